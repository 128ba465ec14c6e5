"""Tests of reused memory: a block is never reused while a tensor holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.ir.types import TensorType
from penstock.runtime.state.tensors import Recycled, as_array

ROW = TensorType("f32", (6,))


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    recycled = Recycled()
    first = recycled.tensor(ROW)
    place = first.data_ptr()
    second = recycled.tensor(ROW)
    assert second.data_ptr() != place
    del first
    third = recycled.tensor(TensorType("i64", (3, 1)))
    assert (third.data_ptr(), third.shape, third.dtype) == (place, (3, 1), torch.int64)


def through_dlpack(tensor: torch.Tensor) -> torch.Tensor:
    """As a result of compiled code that is one of its inputs."""
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "alias",
    [as_array, torch.Tensor.detach, lambda x: x[2:], through_dlpack],
    ids=["array", "detached", "part", "dlpack"],
)
def test_whoever_shares_it_holds_it(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    recycled = Recycled()
    held = alias(recycled.tensor(ROW).fill_(5.0))
    recycled.tensor(ROW).fill_(7.0)
    assert (held == 5.0).all()


def test_a_copy_does_not() -> None:
    """Control: what shares no memory does not hold it."""
    recycled = Recycled()
    first = recycled.tensor(ROW).fill_(5.0)
    place, copy = first.data_ptr(), first.clone()
    del first
    assert recycled.tensor(ROW).data_ptr() == place
    assert copy.sum() == 30


def test_other_sizes_and_empty_tensors_are_apart() -> None:
    recycled = Recycled()
    empty = recycled.tensor(TensorType("f32", (0, 3)))
    assert (empty.shape, empty.numel()) == ((0, 3), 0)
    place = recycled.tensor(ROW).data_ptr()
    assert recycled.tensor(TensorType("f32", (7,))).data_ptr() != place
    assert recycled.tensor(TensorType("f32", ())).shape == ()


def test_two_threads_never_get_one_block() -> None:
    """The first thread is held up between its choice of a block and the mark that it has it."""
    chosen, second = threading.Event(), list[torch.Tensor]()

    class Slow(np.ndarray):
        def view(self, *args: Any) -> Any:
            if not chosen.is_set():
                chosen.set()
                other.join(0.2)
            return super().view(*args)

    recycled = Recycled(memory=lambda nbytes: np.ndarray.__new__(Slow, (nbytes,), np.uint8))
    lend = recycled.lender(ROW)

    def take() -> None:
        chosen.wait(5)
        second.append(lend())

    other = threading.Thread(target=take)
    other.start()
    first = lend()
    other.join(5)
    assert first.data_ptr() != second[0].data_ptr()
