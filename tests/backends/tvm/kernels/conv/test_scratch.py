"""The scratch memory of convolutions that plans count, beside what their kernels allocate."""

from __future__ import annotations

import re

import pytest

from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.ir.graph import Graph
from penstock.ir.memory.scratch import scratch_bytes
from penstock.ir.ops import make

from ...cases import ConvCase, value

pytestmark = pytest.mark.skipif(
    machine_of("host").lanes <= 4 or allow_tiles(),
    reason="scratch memory is counted for vectors of eight floats or more",
)

SAME, MIB = (1, 1, 1, 1), 1 << 20
FORWARD, INPUT, WEIGHT = "forward", "gradient for inputs", "gradient for weights"
CASES = {
    "squares, few channels": ConvCase((16, 64, 24, 24), (128, 64, 3, 3), pads=SAME),
    "squares": ConvCase((16, 128, 12, 12), (128, 128, 3, 3), pads=SAME),
    "squares, images together": ConvCase((8, 512, 7, 7), (512, 512, 3, 3), pads=SAME),
    "squares, one image": ConvCase((1, 256, 14, 14), (256, 256, 3, 3), pads=SAME),
    "one tap": ConvCase((8, 1024, 14, 14), (256, 1024, 1, 1)),
    "one tap, small images": ConvCase((8, 512, 7, 7), (2048, 512, 1, 1)),
    "strides": ConvCase((32, 128, 56, 56), (128, 128, 3, 3), strides=(2, 2), pads=SAME),
    "strides, small images": ConvCase((64, 512, 14, 14), (512, 512, 3, 3), strides=(2, 2), pads=SAME),
    "more channels than filters": ConvCase((16, 128, 64, 64), (64, 128, 3, 3), pads=SAME),
    "stem": ConvCase((32, 3, 224, 224), (64, 3, 7, 7), strides=(2, 2), pads=(3, 3, 3, 3)),
}
# Gradients for the inputs of a model are not computed.
CALLS = [(name, which) for name in CASES for which in (FORWARD, INPUT, WEIGHT) if (name, which) != ("stem", INPUT)]


def graph_of(name: str, which: str = FORWARD) -> Graph:
    case = CASES[name]
    graph = case.graph("s0.f", which == INPUT)
    if which != WEIGHT:
        return graph
    (op,) = graph.ops
    attrs = {**op.attrs, "shape": case.w}
    gradient = make("conv_grad_weight", [op.ins[0], value("dy", str(op.outs[0].type))], ["dw"], **attrs)
    return Graph("s0.w", gradient.ins, gradient.outs, (gradient,))


def allocated(graph: Graph) -> int:
    """Bytes of all buffers of a kernel that are not on the stack."""
    text = str(plan_kernels(graph, machine_of("host")).steps[0].kernel.function.script())
    found = re.findall(r'alloc_buffer\(\((\d+),\)(?:, "(\w+)")?', text)
    items = {"float32": 4, "int32": 4, "float64": 8}
    sizes = [int(count) * items[kind or "float32"] for count, kind in found]
    return sum(size for size in sizes if size >= 1024)


@pytest.mark.parametrize(("name", "which"), CALLS)
def test_what_is_counted_is_near_what_is_allocated(name: str, which: str) -> None:
    graph = graph_of(name, which)
    found, counted = allocated(graph), scratch_bytes([graph], 1, trained=True)
    assert counted == pytest.approx(found, rel=0.2, abs=1.2 * MIB)


def test_what_is_counted_is_too_much_to_leave_out() -> None:
    """The control of the test above: nothing would not be near."""
    large = [(name, which) for name, which in CALLS if allocated(graph_of(name, which)) > 4 * MIB]
    assert {which for _, which in large} == {FORWARD, INPUT, WEIGHT}


def test_a_rank_keeps_what_its_largest_kernel_takes() -> None:
    small, large = map(graph_of, ("squares, few channels", "squares, images together"))
    assert scratch_bytes([small, large], 1, trained=True) == scratch_bytes([large], 1, trained=True)
    assert scratch_bytes([], 1, trained=True) == 0


def test_threads_have_bands_of_their_own_as_far_as_there_are_any() -> None:
    graph = graph_of("squares")
    one, two, many = (scratch_bytes([graph], threads, trained=True) for threads in (1, 2, 64))
    filters, band = 16 * 128 * 128 * 4, 16 * 128 * 128 * 4
    assert (one, two) == (filters + band, filters + 2 * band)
    # 16 images of 36 squares.
    assert many == filters + band * 16 * 36 // 128
    assert scratch_bytes([graph], 1, trained=False) == band
