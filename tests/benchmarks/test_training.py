"""The benchmark runs, its contenders do the same work (from equal weights, equal recurrences give equal losses), and it counts that work right."""

from __future__ import annotations

import os
import re
import statistics
from pathlib import Path

import pytest
import torch
from oracles.repository import BENCHMARKS
from torch.utils.flop_counter import FlopCounterMode

from .benchmark_report import run_benchmark

aten = torch.ops.aten
TURNS = "--steps 3 --rounds 2 --torch-single accumulated-passive"
SMALL = {
    "gpt": "--layers 2 --width 64 --heads 2 --vocab 256 --positions 32",
    "bert": "--model bert --layers 2 --width 64 --heads 2 --vocab 256 --positions 32",
    "resnet": "--model resnet --blocks 1 1 --width 8 --size 32 --classes 10",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", SMALL)
def test_all_contenders_train_the_same_model(tmp_path: Path, model: str) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the benchmark needs two cores")
    found, done = run_benchmark("training", [*SMALL[model].split(), *TURNS.split()], tmp_path, timeout=600)
    assert "vs other-pipeline" in done.stdout
    rows = found["contenders"]
    losses = {name: row["losses"] for name, row in rows.items()}
    assert {len(each) for each in losses.values()} == {7}
    for name in ("penstock-1f1b", "other-pipeline"):
        assert losses[name] == pytest.approx(losses["torch-single"], rel=1e-5)
    # Every schedule of torch's trains the same, alone: a step of warm-up and two of the trial.
    assert set(found["tried"]["other-pipeline"]) >= {"torch-1f1b", "torch-gpipe", "torch-interleaved-zb"}
    for row in found["tried"]["other-pipeline"].values():
        assert row["losses"] == pytest.approx(losses["torch-single"][:3], rel=1e-5)
    # The control: gradients one update late are another recurrence, and the comparison sees it. Batch 0 is of equal weights still.
    assert losses["penstock-2bw"][0] == pytest.approx(losses["torch-single"][0], rel=1e-5)
    assert losses["penstock-2bw"][1:] != pytest.approx(losses["torch-single"][1:], rel=1e-5)
    for row in rows.values():
        assert all(peak > 10**7 for peak in row["peak_bytes"].values())
    if found["peak_flops"]:
        head, _, *lines = (re.split(" {2,}", line) for line in done.stdout.split("\n\n")[1].splitlines())
        for line in lines[: len(rows)]:
            seconds = statistics.median(rows[line[0]]["turn_s"]) / found["steps_per_turn"]
            share = 100 * found["flops_per_step"] / seconds / found["peak_flops"]
            assert line[head.index("of peak")] == f"{share:.0f} %"


@pytest.mark.parametrize(
    ("seconds", "ranks", "cut"),
    [
        ([1, 1, 1, 3], [[0], [1]], [0, 3, 4]),
        ([4, 1, 1, 1, 1], [[0], [1]], [0, 1, 5]),
        ([1] * 8, [[0, 2], [1, 3]], [0, 2, 4, 6, 8]),
        # Dealt round, and down and up again: then the last stage is on the rank of the first.
        ([1, 2, 2, 1, 2], [[0, 2], [1, 3]], [0, 1, 2, 4, 5]),
        ([1, 2, 2, 1, 2], [[0, 3], [1, 2]], [0, 1, 2, 3, 5]),
    ],
)
def test_pipelines_are_cut_where_the_busiest_rank_has_least(
    seconds: list[float], ranks: list[list[int]], cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from torch_contender import best_cut

    assert best_cut(seconds, ranks) == cut


@pytest.mark.parametrize("sizes", [{}, {"layers": 3, "width": 48, "positions": 17}])
def test_the_operations_that_are_counted(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products with weights, as many as torch counts in its contender; of attention, those of a loop over what each position sees."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from torch_contender import loss_of
    from torch_models import Gpt
    from training_shape import Shape

    shape = Shape(**({"layers": 2, "width": 64, "heads": 2, "vocab": 256, "positions": 32, "microbatches": 3} | sizes))
    samples = shape.microbatches * shape.microbatch_samples
    tokens = torch.zeros(samples, shape.positions, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss_of(Gpt(**shape.sizes)(tokens), tokens).backward()
    products = {aten.mm, aten.addmm, aten.bmm}
    found = sum(count for operation, count in counter.get_flop_counts()["Global"].items() if operation in products)
    assert shape.products_per_step == found > 0
    seen = sum(j <= i for i in range(shape.positions) for j in range(shape.positions))
    # Two products forwards, four backwards, two operations for each of the numbers of a head.
    assert shape.attention_per_step == (2 + 4) * 2 * samples * shape.layers * seen * shape.width
    assert shape.flops_per_step == shape.products_per_step + shape.attention_per_step
    # The control: the gradient for the weights of one layer left out is noticed.
    assert shape.products_per_step - 2 * shape.units_per_step * shape.width**2 != found


ACCOUNT = ["--layers", "1", "--width", "32", "--heads", "2", "--vocab", "64", "--positions", "8", "--steps", "6"]


def unaccounted(line: list[str], seconds: float) -> float:
    """The seconds of a step that no part of a line names."""
    return abs(sum(map(float, line[5:])) - seconds)


@pytest.mark.slow
def test_parts_of_the_account_add_up_to_the_step(tmp_path: Path) -> None:
    report, done = run_benchmark("step_account", ACCOUNT, tmp_path)
    assert report["accounts"].keys() == {"2bw", "eager-2bw", "1f1b"}
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    ranks = [rank for account in report["accounts"].values() for rank in account["ranks"]]
    assert len(lines[2:]) == len(ranks) == 6
    for line, rank in zip(lines[2:], ranks, strict=True):
        parts = [value for key, value in rank.items() if key.endswith("_s")]
        step = sum(parts) + sum(graph["run_s"] for graph in rank["graphs"])
        # Cells have milliseconds.
        assert unaccounted(line, step) < 0.005
        # Control: a line without one of its parts does not add up.
        assert unaccounted([*line[:5], str(float(line[5]) + 1.0), *line[6:]], step) > 0.5
