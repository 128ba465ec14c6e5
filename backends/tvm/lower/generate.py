"""The choice of the kernel generator: that for CPUs (kernels/) or that for GPUs (cuda/kernels/generate.py).

In: a group and the machine that its code is for. Out: a Kernel with its TIR.
"""

from __future__ import annotations

from penstock.backends.tvm import kernels
from penstock.backends.tvm.cuda.kernels import generate as cuda
from penstock.backends.tvm.group import Fusion, GeneratedKernel, collective_kernel
from penstock.backends.tvm.target import TargetMachine


def generate(group: Fusion, machine: TargetMachine) -> GeneratedKernel:
    """Generate the kernel of a group; NotOneKernel when it needs several."""
    if (call := collective_kernel(group)) is not None:
        return call
    return cuda.generate(group, machine) if machine.is_device else kernels.generate(group, machine)


def generate_effect(group: Fusion, machine: TargetMachine) -> GeneratedKernel:
    """Generate the kernel of a state operation on its own."""
    return cuda.generate_effect(group, machine) if machine.is_device else kernels.generate_effect(group, machine)
