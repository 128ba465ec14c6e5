"""The scratch memory that kernels of convolutions take on a CPU, beside the values of their graphs.

In: graphs, and the threads that compute them. Out: the bytes of the kernel that takes most. The back end keeps them for
the next kernel, so a rank holds the most over all graphs of its stages, from their first calls on.

    by squares     of 2x2 outputs: the filters with 16 values for each 3x3 taps, and bands of at most some 128 squares
                   with 16 values for each channel, one for each thread at most
    direct sums    the filters as they are packed, and an image with its border for each thread; or, where filters are
                   more than images times panels of them, all images with their borders, and a panel for each thread
    gradients for  all images with their borders, where channels of dy are in lanes; else some hundred KiB
    weights

For 512 channels by 512 that is 16 MiB of filters and 4 MiB of a band. In training filters are packed anew in each call;
for inference they are packed once, ahead. Known limits: these are estimates of what backends/tvm/kernels/conv does, for
vectors of 16 numbers; where there are tile registers, kernels take other blocks. Convolutions over three dimensions and
all other kernels, which take up to some MiB, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from penstock.ir.graph import Graph, Op
from penstock.ir.memo import Derived
from penstock.ir.ops import complete_attrs, is_by_squares, squares_of, window_of

_POINTS, _TAPS, _BAND, _PANEL = 16, 9, 128, 32
# Numbers in a vector, and what it costs to turn one into lanes, in sums.
_LANES, _TURN = 16, 1
# Kernels compute in f32 where values are smaller.
_LEAST_BYTES = 4
_KINDS = ("conv", "conv_grad_input", "conv_grad_weight")
_CONVOLUTIONS = Derived[list[Op]](__name__, "convolutions")


def scratch_bytes(graphs: Iterable[Graph], threads: int, trained: bool) -> int:
    """Return the most scratch memory of one kernel of these graphs."""
    convolutions = (op for graph in graphs for op in graph.keep(_CONVOLUTIONS, _convolutions))
    return max((_bytes(op, threads, trained) for op in convolutions), default=0)


def _convolutions(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.kind in _KINDS and len(op.ins[0].type.dims) <= 4]


def _bytes(op: Op, threads: int, trained: bool) -> int:
    weight = op.outs[0].type if op.kind == "conv_grad_weight" else op.ins[1].type
    item = max(weight.nbytes // weight.size, _LEAST_BYTES) if weight.size else 0
    if op.kind == "conv_grad_weight":
        return _bordered(op) * item
    packed = weight.size if trained else 0
    if is_by_squares(op):
        band = min(threads * _BAND, squares_of(op))
        return (packed * _POINTS // _TAPS + _POINTS * op.ins[0].type.dims[1] * band) * item
    if prod(weight.dims[2:]) == 1:
        return packed * item
    images, panels = op.ins[0].type.dims[0], -(-op.outs[0].type.dims[1] // _PANEL)
    image = _bordered_image(op) if any(_pads(op)) or op.kind == "conv_grad_input" else 0
    if weight.size <= panels * _bordered_image(op):
        return (packed + min(threads, images) * image) * item
    return (images * image + threads * packed // panels) * item


def _bordered(op: Op) -> int:
    """Return the elements of all images with their borders that a gradient for weights packs, 0 if it packs none. It
    has those channels in lanes that cost less: of x, which it reads where it is, or of dy."""
    x, dy, taps = op.ins[0].type.dims, op.ins[1].type.dims, prod(op.outs[0].type.dims[2:])
    if not any(_pads(op)):
        return 0

    def cost(wide: int, other: int, turned: int) -> int:
        return prod(dy[2:]) * taps * other * -(-wide // _LANES) + _TURN * wide * turned

    in_lanes = cost(x[1], dy[1], prod(x[2:])) <= cost(dy[1], x[1], prod(dy[2:]))
    return 0 if in_lanes else x[0] * _bordered_image(op)


def _bordered_image(op: Op) -> int:
    """Return the elements of an image that a kernel reads, with a border for its taps."""
    source, weight = op.ins[0].type.dims, (op.outs[0] if op.kind == "conv_grad_weight" else op.ins[1]).type.dims
    strides = window_of(complete_attrs(op), weight[2:]).strides if op.kind == "conv_grad_input" else (1, 1)
    # With strides the taps of a gradient for inputs fall apart.
    border = [-(-taps // stride) - 1 for taps, stride in zip(weight[2:], strides, strict=False)]
    return source[1] * prod(n + more for n, more in zip(source[2:], border, strict=True))


def _pads(op: Op) -> tuple[int, ...]:
    weight = op.outs[0] if op.kind == "conv_grad_weight" else op.ins[1]
    window = window_of(complete_attrs(op), weight.type.dims[2:])
    return (*window.low, *window.high)
