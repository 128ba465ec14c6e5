"""The subject of tests of the report: a small GPT on two devices, planned with a dump, and a trace as a run of it would
have written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import penstock as ps
from penstock.inspection.dump import Dump
from penstock.inspection.report.material import Material, PassStep
from penstock.inspection.report.reading import trace_of
from penstock.models import write_gpt
from penstock.planning.predict import predict
from penstock.runtime.telemetry.trace import write_trace

SLOWER = 1.5


@dataclass(frozen=True)
class Planned:
    """A plan, the folder of its dump, and a trace in which everything took SLOWER times as long as was predicted."""

    plan: ps.Plan
    folder: Path
    trace: Path
    material: Material


def plan_in(folder: Path) -> Planned:
    write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=24, positions=6, batch=2)
    dump = Dump(folder / "dumps")
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(), microbatches=4)
    plan = ps.plan(
        ps.from_onnx(folder / "gpt.onnx"), ps.Cluster.local(2), training, schedule="2bw", stages=2, dump=dump
    )
    found = predict(plan.module).forecast.simulated
    ranks = [[(str(a), SLOWER * start, SLOWER * end) for a, start, end in found.timed(rank)] for rank in found.lines]
    write_trace(folder / "trace.json", ranks, module=plan.module)
    steps = tuple(PassStep(*row) for row in dump.passes)
    sources = {"s0.F/k0": "def kernel():\n    return 1  # the source of k0\n"}
    trace = trace_of(folder / "trace.json", plan.module)
    return Planned(
        plan, folder / "dumps", folder / "trace.json", Material(plan.module, steps, plan.as_dict(), trace, sources)
    )
