"""A machine of known rates, and what yardsticks take on it: an oracle of measurements."""

from __future__ import annotations

from penstock.doctor.kernels import Rates, yardsticks
from penstock.ir.ops import cost_of

RATES = Rates(
    1, 2e11, 1e10, 32 << 20, 4e10, 2.5e-7, 2e-6,
    {"products": 0.8, "products.bf16": 3.0, "products.f16": 0.3, "convolutions": 0.9, "squares": 1.7, "attention": 0.4, "elements": 0.2, "layout.bytes": 0.5, "updates.bytes": 1.5},
    {"f32": 2e11, "bf16": 6e11, "f16": 6e10},
)  # fmt: skip


def seconds_of(rates: Rates) -> dict[str, float]:
    """What yardsticks take on a machine of these rates, by the definition of each."""
    times = {}
    for stick in yardsticks():
        (op, *more) = stick.graph.ops
        moved = sum(v.type.nbytes for v in (*stick.graph.ins, *stick.graph.outs))
        if stick.key == "overhead":
            times[stick.name] = rates.call_overhead + rates.overhead * (1 + len(more))
            continue
        if stick.key == "updates.bytes":
            moved = 8 * sum(v.type.nbytes for v in op.outs)
        if stick.key in ("bandwidth", "cache"):
            moved *= 3
        work = {
            "updates.bytes": lambda moved=moved: moved / (rates.bandwidth * rates.efficiency["updates.bytes"]),
            "flops": lambda op=op: cost_of(op).flops / rates.flops,
            "bandwidth": lambda moved=moved: moved / rates.bandwidth,
            "cache": lambda moved=moved: (
                moved / (rates.cache_bandwidth if moved * 2 / 3 <= rates.cache else rates.bandwidth)
            ),
            "layout.bytes": lambda moved=moved: moved / (rates.cache_bandwidth * rates.efficiency["layout.bytes"]),
        }
        other = lambda op=op, key=stick.key: cost_of(op).flops / (rates.flops * rates.efficiency[key])  # noqa: E731
        times[stick.name] = rates.call_overhead + work.get(stick.key, other)()
    return times
