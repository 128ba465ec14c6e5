"""Calls of the vendor's libraries, through torch: products, convolutions and attention.

In: a group of one operation with the annotation `library=torch`. Out: a LibraryCall: the name of a function that the
loader registers (torch_calls.py), and as text the operation with the layout changes in front of its operands. The
operands are the values before these changes, which torch makes views of. At run time the function gets the tensors
without copies, on the stream that kernels run on, and fills the results. A product whose group goes on with `accum` is
added to the variable, which is the last operand then.

Accuracy is that of torch: float32 in float32 (no TF32 unless torch is set to it), 16-bit floats with float32
accumulators.
"""

from __future__ import annotations

import json

from penstock.backends.tvm.cuda.torch_calls import ADDED, CALLS, NAME, View
from penstock.backends.tvm.group import Fusion, GeneratedKernel, LibraryCall, NotOneKernel
from penstock.ir.graph import Op, Slot, Value, slot_of
from penstock.ir.ops import VIEWS, complete_attrs
from penstock.ir.types import FLOATS


def library_call(group: Fusion) -> GeneratedKernel:
    """Return the call that computes a group; NotOneKernel when no library does."""
    op, *after = group.ops
    if op.kind not in CALLS or op.outs[0].type.dtype not in FLOATS:
        raise NotOneKernel("no library call")
    slots = _added_to(group, after)
    if not all(v.type.size for v in (*op.ins, *op.outs)):
        raise NotOneKernel("libraries differ in what comes out of nothing")
    bases: list[Value] = []
    chains: list[list[View]] = []
    for value in op.ins:
        base, chain = _base_of(group, value)
        bases.append(base)
        chains.append(chain)
    outs = tuple(v for v in op.outs if v in group.outs)
    # Results that no operation reads are not computed.
    spec: dict[str, object] = {
        "kind": op.kind,
        "attrs": complete_attrs(op),
        "views": chains,
        "wanted": [v in outs for v in op.outs],
    }
    if slots:
        spec["added"] = True
    return GeneratedKernel(LibraryCall(NAME, json.dumps(spec, sort_keys=True)), tuple(bases), slots, outs)


def _added_to(group: Fusion, after: list[Op]) -> tuple[Slot, ...]:
    """Return the variable that a product is added to, if the operations behind it are just that."""
    if not after:
        return ()
    op, value = group.ops[0], after[0].ins[0]
    maker = group.inline.get(value)
    if maker is not None and maker.kind == "cast":
        value = maker.ins[0]
    slot = slot_of(after[0])
    if len(after) > 1 or after[0].kind != "accum" or value is not op.outs[0] or op.kind not in ADDED or group.outs:
        raise NotOneKernel("a library goes on with nothing but a sum in a variable")
    assert slot is not None
    return (slot,)


def _base_of(group: Fusion, value: Value) -> tuple[Value, list[View]]:
    """Return the value in memory that an operand is a view of, and the layout changes between them."""
    chain: list[View] = []
    while value in group.inline:
        op = group.inline[value]
        if op.kind not in VIEWS:
            raise NotOneKernel(f"{op.kind} is not a view of something in memory")
        chain.append((op.kind, complete_attrs(op)))
        value = op.ins[0]
    return value, chain[::-1]
