"""TVM's passes for GPU kernels, from TIR to host and device functions.

In: functions whose loops, memory and barriers are final. Out: the same split into host and device parts. `PIPELINE` is
the name under which `tvm.compile` finds it. TVM's own pipeline would put in barriers where it suspects a conflict, and
fails when the place is inside a condition. The barriers of these kernels stand where threads exchange something, and
tests run the kernels with every cut between barriers in both orders. Nothing else of TVM's pipeline does anything for
functions without scheduling blocks.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx import compilation_pipeline

PIPELINE = "penstock.cuda"


def _passes() -> Any:
    # InferFragment says how pieces of products lie in the registers of a warp.
    lower = tirx.transform
    return tvm.ir.transform.Sequential(
        [
            lower.StmtSimplify(),
            lower.FlattenBuffer(),
            lower.BF16ComputeLegalize(),
            lower.NarrowDataType(32),
            lower.UnrollLoop(),
            lower.StmtSimplify(),
            lower.RemoveNoOp(),
            lower.VerifyMemory(),
            lower.AnnotateEntryFunc(),
            s_tir.transform.InferFragment(),
            lower.SplitHostDevice(),
            lower.MakePackedAPI(),
            lower.BF16StorageLegalize(),
        ]
    )


def _pipeline() -> tuple[Any, Any, Any]:
    return _passes(), compilation_pipeline.finalize_host_passes, compilation_pipeline.finalize_device_passes


compilation_pipeline.register_tir_pipeline(PIPELINE, _pipeline)
