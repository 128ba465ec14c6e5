"""Sums of rows and of whole tensors by registers that the threads of a warp exchange: rows of one warp and of several, in both orders of threads and
from the source that nvcc gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.judge import wrong_results

from penstock.backends.tvm.cuda.kernels.threads import ThreadEmitter
from penstock.ir.graph import Graph, Value
from penstock.ir.ops import make
from penstock.ir.types import TensorType

from .cuda_source import SourceProgram
from .test_generate import build_serial

LENGTHS = (20, 32, 64, 250, 1000)


def graphs() -> list[Graph]:
    made = []
    for i, length in enumerate(LENGTHS):
        x = Value("x", TensorType("f32", (5, length)))
        op = make("softmax", [x], ["y"], axis=-1) if i % 2 else make("sum", [x], ["y"], axes=(0, 1))
        made.append(Graph(f"s0.g{i}", op.ins, op.outs, (op,)))
    return made


def wrong(program: Any) -> list[str]:
    rng = np.random.default_rng(2)
    given = [rng.standard_normal((5, length)).astype(np.float32) for length in LENGTHS]
    return [w for g, x in zip(graphs(), given, strict=True) for w in wrong_results(program, g, [x])]


@pytest.mark.parametrize("forwards", [True, False])
def test_sums_by_exchange(forwards: bool, tmp_path: Path) -> None:
    assert not wrong(build_serial(graphs(), tmp_path, forwards=forwards))


def test_the_source_exchanges_registers(tmp_path: Path) -> None:
    assert not wrong(program := SourceProgram(graphs(), tmp_path))
    source = (tmp_path / "kernels.cpp").read_text()
    # Five steps for the threads of a warp, in place of a barrier for each.
    assert source.count("__shfl_xor_sync(") > 5 * len(LENGTHS)
    assert program.found["k3_kernel"].together


@pytest.mark.parametrize("distance", [1, 16])
def test_control_an_exchange_with_the_wrong_thread_is_noticed(
    distance: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ThreadEmitter.exchange

    def wrong_thread(self: ThreadEmitter, target: Any, source: Any, number: int) -> None:
        exchange(self, target, source, 2 if number == distance else number)

    monkeypatch.setattr(ThreadEmitter, "exchange", wrong_thread)
    assert wrong(build_serial(graphs(), tmp_path))


def test_control_sums_of_warps_that_are_read_before_they_are_there_are_noticed(tmp_path: Path) -> None:
    assert wrong(build_serial(graphs(), tmp_path, forwards=False, drop_barriers=True))
