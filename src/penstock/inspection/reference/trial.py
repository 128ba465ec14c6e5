"""A trial of the CPU kernel of an operation on one example.

In: a row of the op table. Out: the reason for a refusal; empty where there is a kernel.

The example is the first of small operands that the type rule takes, with the default attributes of the row. It shows
that there is a kernel, not that the kernel is right, nor that there is one for all element types: the tests do that
(docs/testing.md).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.ir.graph import Op, Value
from penstock.ir.ops import OpDef, Required, infer_op
from penstock.ir.types import TensorType

_DTYPES = ("f32", "i64", "bool", "u32")
_SHAPES: tuple[tuple[int, ...], ...] = ((4,), (4, 4), (2, 4, 4, 4))


def example_of(row: OpDef) -> Op | None:
    """Return the operation on some operands that fit; None where it has required attributes, or no operands fit."""
    if any(isinstance(spec, Required) for spec in row.attrs.values()):
        return None
    for dtype, shape in product(_DTYPES, _SHAPES):
        ins = tuple(Value(f"x{i}", TensorType(dtype, shape)) for i in range(max(1, row.arity[0])))
        try:
            types = infer_op(Op(row.name, ins, (), {}), {})
        except TypeError:
            continue
        return Op(row.name, ins, tuple(Value(f"y{i}", type_) for i, type_ in enumerate(types)), {})
    return None


def trouble_with(op: Op) -> str:
    """Return the reason why there is no kernel for an operation; empty where there is one."""
    from penstock.backends.tvm.compile.jobs import do  # lazy: heavy
    from penstock.backends.tvm.group import Fusion, rename  # lazy: heavy
    from penstock.backends.tvm.messages import GroupRefused, JobFailed, MakeKernel  # lazy: heavy

    with TemporaryDirectory(prefix="penstock-") as scratch:
        path = Path(scratch) / "kernel.o"
        answer = do(MakeKernel(rename(Fusion((op,), op.outs)).text, "host", f"{op.kind}_", str(path)))
    return answer.what if isinstance(answer, JobFailed) else answer.reason if isinstance(answer, GroupRefused) else ""
