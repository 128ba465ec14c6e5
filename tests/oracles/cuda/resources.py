"""What is held of the resources of every kernel on GPUs: nothing is spilled, and a thread has at most 64 registers, but for products and attention.

In: the sources of stages as a viewer of a compile gets them. Out: a line for each kernel that has more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.backends.interface import StageSources
from penstock.backends.tvm.cuda.resources import KernelResources, resources_of

MOST_REGISTERS = 64
# Their sums live in registers.
PRODUCTS = frozenset(
    ("matmul", "matmul_q", "conv", "conv_grad_input", "conv_grad_weight", "attention", "attention_grad")
)


def excesses(rows: Iterable[KernelResources]) -> list[str]:
    return [
        f"{row.kernel} of {' '.join(row.kinds)} for {row.architecture}"
        for row in rows
        if row.kernel.spilled or (row.kernel.registers > MOST_REGISTERS and not PRODUCTS & set(row.kinds))
    ]


def checked(sources: StageSources) -> list[KernelResources]:
    """The resources of every kernel of a stage: the assembler has said something of each."""
    rows = resources_of(sources)
    names = [row.kernel.name for row in rows]
    # The source declares kernels, and defines them.
    assert sorted(names) == sorted(re.findall(r"__global__ void .*?(\w+)\([^()]*\);", sources.device))
    # A result without elements takes no launch.
    assert set(names) >= {f"{name}_kernel" for name, text in sources.kernels.items() if "blockIdx" in text}
    return rows
