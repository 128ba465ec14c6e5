"""Schedules, levels of `--zero`, split tensors, recomputation and state elsewhere together: each cell trains a small
GPT, or is refused.

    python tests/acceptance/sharding/matrix.py            writes matrix.json anew: minutes

In: a cell. Out: its losses beside those of one device and of level 0, or the words that refuse it. Ranks are processes
with the NumPy back end, which adds up in the order that the program says. One device trains with the same schedule, but
for packs, whose losses are those of one stage on a device. `docs/refresh.py` makes the table of matrix.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import penstock as ps
from penstock.ir.graph import Module
from penstock.ir.schedule_names import PACKED
from penstock.models import write_gpt
from penstock.passes.schedules.schedule import single_like

FILE = Path(__file__).with_name("matrix.json")
STEPS, MICROBATCHES, BATCH, POSITIONS, VOCABULARY = 20, 4, 2, 8, 24
# Steps of trainings beside the matrix: some of them with weights that AdamW's averages have moved.
FEW = 5
SCHEDULES = ("1f1b", "2bw", "interleaved", "interleaved-2bw")
LEVELS, SPLITS, RECOMPUTED = (0, 1, 2, 3), (1, 2), ("none", "all")
TRAINING = ps.Training("cross_entropy", ps.AdamW(lr=1e-3), MICROBATCHES)


class Cell(NamedTuple):
    """A way to train: two stages with so many replicas, each split over `tp` devices, of which stages may have unlike
    numbers: "2;1". Under a schedule of `PACKED` a device has two of four stages. `offload` is none or state."""

    schedule: str
    level: int
    tp: int | str
    recompute: str
    replicas: int = 2
    offload: str = "none"

    def __str__(self) -> str:
        text = f"{self.schedule} zero={self.level} tp={self.tp} recompute={self.recompute} replicas={self.replicas}"
        return f"{text} offload={self.offload}"


# Two devices for each replica of the first stage, or of the first pack of stages, and one for the second.
UNLIKE = "2;1"
# With one replica there is nothing that replicas could share out.
CELLS = (
    *(Cell(*cell) for cell in product(SCHEDULES, LEVELS, SPLITS, RECOMPUTED)),
    *(Cell(*cell, replicas=1) for cell in product(SCHEDULES, (0,), SPLITS, RECOMPUTED)),
    *(Cell(*cell, offload="state") for cell in product(SCHEDULES, LEVELS, SPLITS, ("none",))),
    *(Cell(*cell, replicas=1, offload="state") for cell in product(SCHEDULES, (0,), SPLITS, ("none",))),
    *(Cell(*cell) for cell in product(SCHEDULES, LEVELS, (UNLIKE,), ("none",))),
    *(Cell(*cell, replicas=1) for cell in product(SCHEDULES, (0,), (UNLIKE,), ("none",))),
)


@cache
def model() -> ps.Model:
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"layers": 4, "width": 16, "heads": 2, "vocab": VOCABULARY, "positions": POSITIONS, "batch": BATCH}
        return ps.from_onnx(write_gpt(Path(folder) / "gpt.onnx", **sizes))


def planned(cell: Cell) -> ps.Plan:
    """Return the plan of a cell; PenstockError where it is refused."""
    widths = [int(width) for width in str(cell.tp).split(";")]
    axes = [{"dp": cell.replicas, "tp": width} for width in widths]
    meshes = [",".join(f"{axis}={n}" for axis, n in of_stage.items() if n > 1 or len(widths) > 1) for of_stage in axes]
    settings: dict[str, Any] = {"packs": 2} if cell.schedule in PACKED else {}
    if len(widths) > 1:
        ends = range(3) if settings else (1,)
        settings["split_at"] = tuple(f"h.{layer}.mlp.residual" for layer in ends)
    return ps.plan(
        model(),
        ps.Cluster.local(2 * cell.replicas * sum(widths) // len(widths)),
        TRAINING,
        schedule=cell.schedule,
        stages=2,
        mesh=";".join(meshes),
        shard=("preset:megatron",) if max(widths) > 1 else (),
        zero=cell.level,
        recompute=cell.recompute,
        offload=cell.offload,
        **settings,
    )


def batches(module: Module, steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    """Return the batches of the first steps."""
    rng = np.random.default_rng(0)
    tokens, labels = module.data_inputs
    drawn = [rng.integers(0, VOCABULARY, (BATCH * MICROBATCHES, POSITIONS + 1)) for _ in range(steps)]
    return [{tokens.name: x[:, :-1], labels.name: x[:, 1:]} for x in drawn]


def trained(plan: ps.Plan, steps: int = STEPS) -> list[float]:
    """Train the plan for some steps and return its losses."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ps.open(ps.compile(plan, Path(folder) / "bundle", backend="numpy"), timeout=60) as job,
    ):
        return list(job.run(iter(batches(plan.module, steps))))


@cache
def on_one_device(schedule: str) -> list[float]:
    plan = ps.plan(model(), ps.Cluster.local(1), TRAINING, schedule=single_like(schedule), stages=1)
    return trained(plan)


@cache
def at_level_zero(schedule: str, tp: int | str, replicas: int) -> list[float]:
    return trained(planned(Cell(schedule, 0, tp, "none", replicas)))


def outcome(cell: Cell) -> dict[str, Any]:
    """Return how a cell compares, or the words that refuse it."""
    try:
        plan = planned(cell)
    except ps.PenstockError as error:
        return {"cell": list(cell), "refused": error.what}
    losses, right = trained(plan), on_one_device(cell.schedule)
    error = max(abs(a - b) / abs(b) for a, b in zip(losses, right, strict=True))
    same = losses == at_level_zero(cell.schedule, cell.tp, cell.replicas)
    return {"cell": list(cell), "error": error, "same_as_level_0": same}


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table: a line for each way to train, a column for each level."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        cell = Cell(*row["cell"])
        if "refused" in row:
            text = "refused"
        elif cell.level and row["same_as_level_0"]:
            text = "same bits"
        else:
            text = f"{row['error']:.0e}" if row["error"] else "same bits as one device"
        way = (cell.schedule, str(cell.replicas), str(cell.tp), cell.recompute, cell.offload)
        lines.setdefault(way, {})[cell.level] = text
    head = ["schedule", "replicas", "tp", "recompute", "elsewhere", *(f"level {level}" for level in LEVELS)]
    return head, [[*way, *(levels.get(level, "-") for level in LEVELS)] for way, levels in lines.items()]


def refusals(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the words that refuse cells, each once."""
    return sorted({row["refused"] for row in rows if "refused" in row})


def main() -> int:
    rows = []
    for cell in CELLS:
        rows.append(outcome(cell))
        print(cell, {key: value for key, value in rows[-1].items() if key != "cell"}, file=sys.stderr, flush=True)
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
