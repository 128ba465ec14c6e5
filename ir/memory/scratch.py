"""The scratch memory that kernels of convolutions take on a CPU, beside the values of their graphs.

In: a graph, and the threads that compute it. Out: the bytes of the kernel that takes most. The back end keeps them for
the next kernel, so a rank holds the most over all graphs of its stages, from their first calls on.

A convolution packs its filters. By squares of 2x2 outputs each 3x3 taps become 16 values, and each thread packs a band
of at most some 128 squares, with 16 values for each channel. For 512 channels that is 16 MiB of filters and 4 MiB of
a band. In training filters are packed anew in each call; for inference they are packed once, in place of the weights.
Known limits: other kernels take up to some hundred KiB, gradients for weights and strided gradients for inputs up to a
few MiB, and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.ir.graph import Graph, Op
from penstock.ir.memo import Derived
from penstock.ir.ops import is_by_squares, squares_of

_POINTS, _TAPS, _BAND = 16, 9, 128
# Kernels compute in f32 where values are smaller.
_LEAST_BYTES = 4
_CONVOLUTIONS = Derived[list[Op]](__name__, "convolutions")


def scratch_bytes(graphs: Iterable[Graph], threads: int, trained: bool) -> int:
    """Return the most scratch memory of one kernel of these graphs."""
    convolutions = (op for graph in graphs for op in graph.keep(_CONVOLUTIONS, _convolutions))
    return max((_bytes(op, threads, trained) for op in convolutions), default=0)


def _convolutions(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.kind in ("conv", "conv_grad_input")]


def _bytes(op: Op, threads: int, trained: bool) -> int:
    weight = op.ins[1].type
    item = max(weight.nbytes // weight.size, _LEAST_BYTES) if weight.size else 0
    packed = weight.size * item if trained else 0
    if not is_by_squares(op):
        return packed
    band = _POINTS * op.ins[0].type.dims[1] * min(_BAND, squares_of(op)) * item
    return packed * _POINTS // _TAPS + threads * band
