"""The resources of kernels on a GPU: what the assembler gives them, and how much of a multiprocessor they fill.

In: the sources of a stage for a GPU, as a viewer of a compile gets them: CUDA source, and what `ptxas -v` says. Out: a
row per launch. Occupancy is the share of the threads of a multiprocessor that can be there at one time:

    warps  = 65536 registers / (registers of a thread * 32, rounded up to 256), rounded down to 4
    blocks = min(warps / warps of a block, threads / threads of a block, shared memory / that of a block, most blocks)

with the limits of the architecture; a block takes 1 KB of shared memory for the system from sm_80 on. It is a bound by
formula: nothing is said of a grid that is too small to fill a device.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from penstock.backends.interface import StageSources

# A multiprocessor's most threads and blocks, and bytes of its shared memory: the table of technical specifications in
# the CUDA programming guide.
_LIMITS = {
    70: (2048, 32, 96 << 10),
    72: (2048, 32, 96 << 10),
    75: (1024, 16, 64 << 10),
    80: (2048, 32, 164 << 10),
    86: (1536, 16, 100 << 10),
    87: (1536, 16, 164 << 10),
    89: (1536, 24, 100 << 10),
    90: (2048, 32, 228 << 10),
    100: (2048, 32, 228 << 10),
    103: (2048, 32, 228 << 10),
    120: (1536, 24, 100 << 10),
}
_REGISTERS, _WARP = 65536, 32
# The registers of a thread that a kernel which spills gets at first.
_FIRST_LIMIT = 64

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED, _SHARED = re.compile(r"Used (\d+) registers"), re.compile(r"(\d+) bytes smem")
# Definitions; the source declares all kernels first. Those without bounds have one thread in a block.
_BOUNDS = re.compile(r"__global__ void (?:__launch_bounds__\((\d+)(?:, \d+)?\) )?(\w+)\([^()]*\) \{")
_BLOCKS = re.compile(r"__launch_bounds__\((\d+)(?:, (\d+))?\) (\w+)\(")
_NAME = re.compile(r"(\w+?)_kernel(?:_\d+)?")


class Assembled(NamedTuple):
    """The words of the assembler on one kernel: registers of a thread, bytes of its stack frame and of spilled
    registers, bytes of a block's shared memory."""

    name: str
    registers: int
    frame: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class KernelResources:
    """A launch of a stage: the kernel, the operations of its group, its architecture, the threads of a block."""

    kernel: Assembled
    operations: tuple[str, ...]
    architecture: str
    threads: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(text.rpartition(" = ")[2].partition(" ")[0] for text in self.operations)

    @property
    def occupancy(self) -> float | None:
        """The share of a multiprocessor's threads; None for architectures without known limits."""
        return occupancy(self.architecture, self.threads, self.kernel.registers, self.kernel.shared)


def read_assembled(text: str) -> list[Assembled]:
    """Read the words of `ptxas -v`, a kernel after the other."""
    kernels = []
    for part in re.split(r"(?=.*Compiling entry function)", text):
        entry, frame, used = _ENTRY.search(part), _FRAME.search(part), _USED.search(part)
        if entry is not None and frame is not None and used is not None:
            shared = _SHARED.search(part)
            spilled = int(frame[2]) + int(frame[3])
            kernels.append(Assembled(entry[1], int(used[1]), int(frame[1]), spilled, int(shared[1]) if shared else 0))
    return kernels


def loosened(source: str, spilling: Collection[str]) -> str:
    """Return CUDA source with wider limits of registers for kernels that spill.

    Without a number of blocks in its bounds, the assembler prefers many threads to few spills. The first number leaves
    a thread 64 registers; each later one is half of it, to one block. The source is unchanged where none is left.
    """

    def wider(match: re.Match[str]) -> str:
        threads, blocks, name = int(match[1]), match[2], match[3]
        if name not in spilling:
            return match[0]
        fewer = int(blocks) // 2 if blocks else _REGISTERS // (threads * _FIRST_LIMIT)
        return f"__launch_bounds__({threads}, {max(fewer, 1)}) {name}("

    return _BLOCKS.sub(wider, source)


def resources_of(sources: StageSources) -> list[KernelResources]:
    """Return the launches of a stage in the order of the source."""
    assembled = {kernel.name: kernel for kernel in read_assembled(sources.assembled)}
    operations = {call.source: call.operations for call in sources.calls}
    rows = []
    for match in _BOUNDS.finditer(sources.device):
        name = _NAME.fullmatch(match[2])
        assert name is not None, match[2]
        if match[2] in assembled:
            rows.append(
                KernelResources(assembled[match[2]], operations.get(name[1], ()), sources.target, int(match[1] or 1))
            )
    return rows


def occupancy(architecture: str, threads: int, registers: int, shared: int) -> float | None:
    """Return the share of a multiprocessor's threads that blocks of so many threads, registers and bytes can fill."""
    number = int(re.sub(r"\D", "", architecture))
    if number not in _LIMITS:
        return None
    most_threads, most_blocks, most_shared = _LIMITS[number]
    warps = -(-threads // _WARP)
    of_warp = -(-max(registers, 1) * _WARP // 256) * 256
    of_block = -(-(shared + (1024 if number >= 80 else 0)) // 128) * 128
    blocks = min(
        most_blocks,
        most_threads // (warps * _WARP),
        _REGISTERS // of_warp // 4 * 4 // warps,
        most_shared // of_block if of_block else most_blocks,
    )
    return blocks * warps * _WARP / most_threads
