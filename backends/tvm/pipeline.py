"""The passes over kernels between the generators and LLVM.

In: an IRModule of kernels. Out: the same kernels as packed functions that TVM's code generator takes. `PIPELINE` is the
name under which `tvm.compile` finds the pipeline.

TVM's own list is for schedules of blocks and for devices: most of it does nothing for these kernels. Left out for its
cost is FlattenBuffer. Its time grows with the square of the number of buffers: 0.6 of the 0.9 s that a ragged matrix
product took. The kernels' buffers have one dimension already. Only bools still need the pass, which makes bytes of
them, so it runs on functions that hold some. The code that comes out is the same.

Kernels trust their arguments: the checks of types, shapes, strides and devices that TVM puts before a kernel are
removed. They were most of the code of a small kernel, and half of the time to compile it. The caller of a graph's
function is checked once, at its inputs and slots (run/load.py, lower/lower.py). The arguments that a library's own code
passes to its kernels are settled when it is linked.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx import compilation_pipeline

from penstock.backends.tvm.stack_storage import keep_on_stack

PIPELINE = "penstock"
# An attribute of functions that have bools in memory.
HOLDS_BOOLS = "penstock.bools"


def _flatten_bools(function: Any, module: Any, context: Any) -> Any:
    if HOLDS_BOOLS not in (function.attrs or {}):
        return function
    return tirx.transform.FlattenBuffer()(tvm.IRModule({"kernel": function}))["kernel"]


def _kept_on_stack(function: Any, _module: Any, _context: Any) -> Any:
    return keep_on_stack(function)


def _passes() -> list[Any]:
    return [
        tirx.transform.StmtSimplify(),
        tirx.transform.prim_func_pass(_flatten_bools, opt_level=0, name="penstock.FlattenBools"),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.StorageRewrite(),
        tirx.transform.prim_func_pass(_kept_on_stack, opt_level=0, name="penstock.KeepOnStack"),
        s_tir.transform.HoistIfThenElse(),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        s_tir.transform.RewriteUnsafeSelect(),
        tirx.transform.CommonSubexprElim(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.SkipAssert(),
        tirx.transform.BF16StorageLegalize(),
    ]


def _pipeline() -> Any:
    return (
        tvm.ir.transform.Sequential(_passes()),
        compilation_pipeline.finalize_host_passes,
        compilation_pipeline.finalize_device_passes,
    )


compilation_pipeline.register_tir_pipeline(PIPELINE, _pipeline)
