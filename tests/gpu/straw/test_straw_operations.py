"""Rows of the op table on devices of straw: TVM's own CUDA runtime loads and launches what is compiled for GPUs, against the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.tvm.cuda.kernels.generate import KINDS
from penstock.backends.tvm.cuda.torch_calls import CALLS

# One of each way to use threads and memory.
SOME = (
    "gelu",
    "transpose",
    "sum",
    "softmax",
    "matmul",
    "max_pool_grad",
    "gather_grad",
    "attention_grad",
    "attend",
    "pick",
)
TENSOR_CORES = "tensor cores"


def test_rows_agree_with_the_interpreter_and_leave_nothing_behind(program: Callable[..., Any], tmp_path: Path) -> None:
    said = program("gpu.straw.rows", tmp_path, 4, "none", *SOME, TENSOR_CORES)
    check(said)
    assert said["samples"] > 2 * len(SOME)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_sample_of_every_row(part: int, program: Callable[..., Any], tmp_path: Path) -> None:
    kinds = sorted((*KINDS, TENSOR_CORES))[part::8]
    check(program("gpu.straw.rows", tmp_path, 1000, "none", *kinds, timeout=3000))


@pytest.mark.slow
def test_library_calls(program: Callable[..., Any], tmp_path: Path) -> None:
    """Torch computes, on the stream that kernels run on, and with the kernels' memory: attention with masks, too."""
    check(program("gpu.straw.rows", tmp_path, 4, "torch", *sorted(CALLS)))


def check(said: dict[str, Any]) -> None:
    assert not said["wrong"]
    assert not said["report"]
    once, twice, gone = said["blocks"]
    # TVM keeps the workspaces of kernels for the thread that took them. A machine keeps the results of its last call.
    assert once == twice
    assert gone <= min(once, 4)
