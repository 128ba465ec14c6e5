"""The choice between the kernels of a convolution of bytes: with neighbouring positions in lanes, or with outputs."""

from __future__ import annotations

from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel
from penstock.ir.graph import Op
from penstock.ir.ops import complete_attrs, integer, window_of

from .convolution import PositionLanes
from .geometry import turns_outputs
from .output_lanes import OutputLanes
from .packing import is_symmetric


def emit_conv_bytes(body: Body, op: Op) -> None:
    """Emit a convolution of bytes."""
    machine, weight, out = body.machine, op.ins[1].type.dims, op.outs[0].type.dims
    if machine.lanes == 16 and not (machine.has_byte_products or machine.has_words):
        raise NotOneKernel("the processor multiplies no vectors of 16-bit numbers")
    attrs = complete_attrs(op)
    window, filters = window_of(attrs, weight[2:]), out[1] // integer(attrs["groups"])
    kind = (machine.lanes, 4 if machine.has_byte_products else 2)
    turned = is_symmetric(body, op) and turns_outputs(window, out[2:], filters, weight[1], kind)
    (OutputLanes if turned else PositionLanes)(body, op).run()
