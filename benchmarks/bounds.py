"""The shortest time that the work of a model allows on some threads, as a bound on every speedup.

In: the program of a plan of one stage, and cores. Out: its work, and

    seconds >= max(operations / peak, bytes of weights / read rate)

Operations are those of the op table, but of convolutions that are computed by squares (docs/backends.md) what squares
need. Bytes are those of weights that something else than a gather reads. Both rates are measured on these cores, busy
at once (peak.py): multiply-adds in registers, and adding up a list as long as the weights. Known limits: activations
cost nothing here, and neither does a change between computing and reading, so no program reaches the bound. One that
needs fewer operations, as by larger squares, may pass it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from peak import RegisterLoop, rate_of_cores, read_rate_of_cores

from penstock.ir.graph import Module
from penstock.ir.ops import cost_of, is_by_squares
from penstock.passes.costs.prices import MULTIPLIED_BY_SQUARES


@dataclass(frozen=True)
class Work:
    """The work of a model: floating point operations, and bytes of weights that are read."""

    operations: float
    weight_bytes: int


@dataclass(frozen=True)
class Rates:
    """What some cores do in a second at most: floating point operations, and bytes of weights that they read."""

    operations: float
    weight_bytes: float


def work_of(module: Module) -> Work:
    """Count the work of a module of one stage."""
    graph = module.stage_graph(0, "F")
    assert graph is not None, "a stage has a forward graph"
    counts = [cost_of(op).flops * (MULTIPLIED_BY_SQUARES if is_by_squares(op) else 1) for op in graph.ops]
    computed = {value for op in graph.ops if op.kind != "gather" for value in op.ins}
    weights = {op.var: op.outs[0].type.nbytes for op in graph.ops if op.kind == "read" and op.outs[0] in computed}
    return Work(sum(counts), sum(weights.values()))


def measure_rates(loop: RegisterLoop, cores: Sequence[int], work: Work) -> Rates:
    """Measure the rates of these cores for this work."""
    return Rates(rate_of_cores(loop, cores), read_rate_of_cores(loop, cores, work.weight_bytes))


def shortest_s(work: Work, rates: Rates) -> float:
    """Return the seconds that the slower of computing and reading takes."""
    return max(work.operations / rates.operations, work.weight_bytes / rates.weight_bytes)


def described(work: Work, rates: Rates | None) -> dict[str, object]:
    """Return work, rates and the shortest time as plain data; without rates the work alone."""
    if rates is None:
        return {"work": asdict(work)}
    return {"work": asdict(work), "rates": asdict(rates), "shortest_s": shortest_s(work, rates)}
