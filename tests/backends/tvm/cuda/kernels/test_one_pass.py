"""Rows whose largest element and sum of exponentials come from one pass: long rows, rows that rise and fall, infinities, in both orders of threads and
from the source that nvcc gets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.judge import wrong_results

from penstock.backends.tvm.cuda.kernels import loops
from penstock.ir.graph import Graph, Value
from penstock.ir.ops import make
from penstock.ir.types import TensorType

from .cuda_source import SourceProgram
from .test_generate import build_serial

# Longer than the memory of a block for rows; a row for every way to go up and down.
LENGTH = 9000


def rows() -> np.ndarray:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, LENGTH)).astype(np.float32)
    x[1] = np.linspace(-80, 80, LENGTH)
    x[2] = np.linspace(80, -80, LENGTH)
    x[3, : LENGTH // 2] = -np.inf
    x[4, 7] = np.inf
    x[5, LENGTH - 1] = np.nan
    return x


def graphs() -> list[Graph]:
    x = Value("x", TensorType("f32", (6, LENGTH)))
    labels = Value("labels", TensorType("i64", (6,)))
    across = make("softmax", [x], ["y"], axis=0)
    made = [make("softmax", [x], ["y"], axis=-1), make("log_softmax", [x], ["y"], axis=-1), across]
    loss = make("cross_entropy", [x, labels], ["loss", "lse"])
    return [
        *(Graph(f"s0.g{i}", op.ins, op.outs, (op,)) for i, op in enumerate(made)),
        Graph("s0.g3", loss.ins, loss.outs, (loss,)),
    ]


def check(folder: Path, forwards: bool = True) -> list[str]:
    arrays = [rows(), np.arange(6)]
    program = build_serial(graphs(), folder, forwards=forwards)
    with np.errstate(all="ignore"):
        return [wrong for g in graphs() for wrong in wrong_results(program, g, arrays[: len(g.ins)])]


@pytest.mark.parametrize("forwards", [True, False])
def test_one_pass_is_as_good_as_two(forwards: bool, tmp_path: Path) -> None:
    assert not check(tmp_path, forwards)


def test_the_source_of_one_pass(tmp_path: Path) -> None:
    arrays = [rows(), np.arange(6)]
    program = SourceProgram(graphs()[:3], tmp_path)
    with np.errstate(all="ignore"):
        assert not [wrong for g in graphs()[:3] for wrong in wrong_results(program, g, arrays[:1])]


def test_control_sums_that_are_not_scaled_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads add up what they have, each beside a largest element of its own."""
    fold = loops.DeviceRows._fold_all

    def forgetful(self: loops.DeviceRows, totals: object, dtype: str, steps: object) -> object:
        first, *_ = totals  # type: ignore[misc]
        if "top" in first.name:
            return [self.emit.bind(self.emit.load(first, loops.zero()))]
        return fold(self, totals, dtype, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(loops.DeviceRows, "_fold_all", forgetful)
    assert check(tmp_path)
