"""The buffers on a GPU that copies and messages go through, counted by hand."""

from __future__ import annotations

import pytest

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Edge, Module, Stage, Value
from penstock.ir.memory.passages import passage_bytes
from penstock.ir.types import TensorType


def value(name: str, kib: int) -> Value:
    return Value(name, TensorType("f32", (kib * 256,)))


def module(*places: tuple[str, str]) -> Module:
    """Two stages on devices (kind, host). Forwards go 200 and 300 KiB, which travel alone, and two small ones together; back come 200 KiB."""
    devices = tuple(Device(f"{kind}:{i}", kind, host) for i, (kind, host) in enumerate(places))
    there = (value("a", 200), value("b", 300), value("c", 40), value("d", 40))
    return Module(
        "m",
        cluster=Cluster(devices),
        stages=tuple(Stage(i, device.name) for i, device in enumerate(devices)),
        edges=(Edge(0, 1, "F", there), Edge(1, 0, "B", (value("e", 200),))),
    )


CASES = {
    # By the host's memory each size has two buffers for each direction; the input of 300 KiB is one more.
    "pinned": ((("cuda", "a"), ("cpu", "a")), (200 + 300 + 80) + 200 + 300),
    "gloo": ((("cuda", "a"), ("cpu", "b")), (200 + 300 + 80) + 200 + 300),
    # What the other GPU writes into, and the input.
    "ipc": ((("cuda", "a"), ("cuda", "a")), 200 + 300),
    "nccl": ((("cuda", "a"), ("cuda", "b")), 300),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_stage(case: str) -> None:
    places, kib = CASES[case]
    assert passage_bytes(module(*places), 0, [value("x", 300), value("label", 1)]) == 2 * kib << 10


def test_a_size_is_counted_once_in_a_direction_over_the_host_and_for_each_channel_between_gpus() -> None:
    """The input is as large as a message: over the host they share buffers. The control: another size does not."""
    pinned = module(("cpu", "a"), ("cuda", "a"))
    alone = passage_bytes(pinned, 1, [])
    assert alone == 2 * (200 + 300 + 80 + 200) << 10
    assert passage_bytes(pinned, 1, [value("x", 200)]) == alone
    assert passage_bytes(pinned, 1, [value("x", 201)]) == alone + (2 * 201 << 10)
    assert passage_bytes(pinned, 1, [value("x", 63)]) == alone
    near = module(("cuda", "a"), ("cuda", "a"))
    assert passage_bytes(near, 1, [value("x", 200)]) == 2 * (200 + 300 + 80 + 200) << 10
