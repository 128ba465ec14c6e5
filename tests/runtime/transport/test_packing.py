"""Tests of the messages of an edge, of microbatches of several sizes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.graph import Value
from penstock.ir.types import TensorType
from penstock.runtime.state.tensors import Recycled
from penstock.runtime.transport.packing import EdgePackings

# Values alone in a message, values that share one, and both; the largest rung first.
RUNGS = {"64": 64, "1": 1, "8": 8, "33": 33}


def values_of(rows: int) -> tuple[Value, ...]:
    """Return an edge's values at a size."""
    types = [TensorType("f32", (rows, 1 << 10)), TensorType("bool", (rows,)), TensorType("i64", (2, rows))]
    return tuple(Value(f"v{i}.{rows}", type) for i, type in enumerate(types))


def packings_of(buffers: Recycled, rung_of: list[str]) -> EdgePackings:
    """Return the packings of microbatches whose sizes a list says."""
    return EdgePackings({rung: values_of(rows) for rung, rows in RUNGS.items()}, rung_of.__getitem__, buffers)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(list(RUNGS)), min_size=1, max_size=8))
def test_values_arrive_at_their_size(rungs: list[str]) -> None:
    sent, arrived = (packings_of(Recycled(), rungs) for _ in range(2))
    under_way = []
    for mb, rung in enumerate(rungs):
        tensors = [torch.full(v.type.dims, mb + 1).to(torch.float32) for v in values_of(RUNGS[rung])]
        typed = [tensors[0], tensors[1] > 0, tensors[2].to(torch.int64)]
        assert sent.of(mb).names == tuple(v.name for v in values_of(RUNGS[rung]))
        memory = arrived.of(mb).messages()
        for message, place in zip(sent.of(mb).pack(typed), memory, strict=True):
            place.copy_(message)
        under_way.append((typed, memory))
    for mb, (typed, memory) in enumerate(under_way):
        assert all(torch.equal(a, b) for a, b in zip(arrived.of(mb).unpack(memory), typed, strict=True))


def test_smaller_sizes_take_no_memory_of_their_own() -> None:
    blocks: list[int] = []

    def counted(nbytes: int):  # type: ignore[no-untyped-def]
        blocks.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8).numpy()

    rungs = list(RUNGS)
    packings = packings_of(Recycled(memory=counted), rungs)
    for mb in range(len(rungs)):
        packings.of(mb).messages()
    # Control: memory by size alone would have blocks of every size.
    assert len({packing.sizes()[0] for packing in packings.all}) == len(RUNGS)
    assert blocks == packings.of(0).sizes()
