"""The scratch memory of convolutions that plans count, beside what their kernels allocate."""

from __future__ import annotations

import re

import pytest

from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.ir.graph import Graph
from penstock.ir.memory.scratch import scratch_bytes
from penstock.ir.types import ITEM_BYTES

from ...cases import ConvCase

pytestmark = pytest.mark.skipif(
    machine_of("host").lanes <= 4 or allow_tiles(),
    reason="scratch memory is counted for vectors of eight floats or more",
)

SAME, MIB, FEW = (1, 1, 1, 1), 1 << 20, "squares, few in an image"
CASES = {
    "squares, few channels": ConvCase((16, 64, 24, 24), (128, 64, 3, 3), pads=SAME),
    "squares": ConvCase((16, 128, 12, 12), (128, 128, 3, 3), pads=SAME),
    FEW: ConvCase((16, 128, 6, 6), (256, 128, 3, 3), pads=SAME),
    "squares, images together": ConvCase((8, 512, 7, 7), (512, 512, 3, 3), pads=SAME),
    "squares, one image": ConvCase((1, 256, 14, 14), (256, 256, 3, 3), pads=SAME),
    "one tap": ConvCase((8, 1024, 14, 14), (256, 1024, 1, 1)),
    "one tap, small images": ConvCase((8, 512, 7, 7), (2048, 512, 1, 1)),
}


def allocated(graph: Graph) -> int:
    """Bytes of all buffers of a kernel that are not on the stack."""
    text = str(plan_kernels(graph, machine_of("host")).steps[0].kernel.function.script())
    found = re.findall(r'alloc_buffer\(\((\d+),\)(?:, "(\w+)")?', text)
    items = {"float32": 4, "int32": 4, "float64": 8}
    sizes = [int(count) * items[kind or "float32"] for count, kind in found]
    return sum(size for size in sizes if size >= 1024)


# Not counted as they are: gradients that the back end sums directly for want of squares in an image.
CALLS = [(name, gradient) for name in CASES for gradient in (False, True) if (name, gradient) != (FEW, True)]


@pytest.mark.parametrize(("name", "gradient"), CALLS)
def test_what_is_counted_is_near_what_is_allocated(name: str, gradient: bool) -> None:
    graph = CASES[name].graph("s0.f", gradient)
    found, counted = allocated(graph), scratch_bytes([graph], 1, trained=True)
    assert counted == pytest.approx(found, rel=0.15, abs=MIB)
    # The control: it is more than a few blocks that could be left out.
    assert found > 0.9 * MIB


def test_a_rank_keeps_what_its_largest_kernel_takes() -> None:
    small, large = (CASES[name].graph("s0.f", False) for name in ("squares, few channels", "squares, images together"))
    assert scratch_bytes([small, large], 1, trained=True) == scratch_bytes([large], 1, trained=True)
    assert scratch_bytes([], 1, trained=True) == 0


def test_threads_have_bands_of_their_own_and_inference_has_no_packed_filters() -> None:
    graph = CASES["squares"].graph("s0.f", False)
    one, two = (scratch_bytes([graph], threads, trained=True) for threads in (1, 2))
    filters = 16 * 128 * 128 * ITEM_BYTES["f32"]
    assert two - one == one - filters == scratch_bytes([graph], 1, trained=False)
