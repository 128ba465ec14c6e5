"""CUDA targets: the GPU that code is compiled for.

In: an architecture as NVIDIA names it, `sm_90`. Out: a TargetMachine for the generators and a TVM target. Code is for
exactly that architecture and runs on devices of the same major number and the same or a higher minor one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from penstock.backends.tvm.target import WITHOUT_VECTOR_COMBINE, TargetMachine
from penstock.support.errors import UsageError

_ARCHITECTURE = re.compile(r"sm_(\d{2,3})([af]?)")


@lru_cache(maxsize=32)
def device_machine(name: str) -> TargetMachine:
    """Return the machine of an architecture name."""
    match = _ARCHITECTURE.fullmatch(name)
    if match is None or int(match[1]) < 70:
        raise UsageError(
            f"unknown CUDA architecture {name!r}", hint="names are those of nvcc, from sm_70 on: sm_80, sm_90, ..."
        )
    return TargetMachine(name, 1, 1, 1, 1, 1, is_device=True)


def cuda_target(name: str) -> Any:
    """Return TVM's target for an architecture. The host part only calls the kernels: any processor of this machine's
    kind runs it."""
    import tvm  # lazy: heavy

    device = {
        "kind": "cuda",
        "arch": name,
        "max_shared_memory_per_block": 48 * 1024,
        "max_threads_per_block": 1024,
        "thread_warp_size": 32,
    }
    return tvm.target.Target(device, host={"kind": "llvm", "cl-opt": [WITHOUT_VECTOR_COMBINE]})
