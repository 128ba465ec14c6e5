"""The GPUs of this host, as torch opens them, and the checks of one before a run.

In: the GPU that a device of the plan names, by number or UUID, and the architecture that its code is for. Out: a device
of torch, or one UsageError that says what the stage needs and what this host has. Numbers are those of CUDA in this
process: CUDA_VISIBLE_DEVICES chooses and orders devices, and a UUID means one device whatever the order.

Memory: what the plan says of all stages on a GPU, and for each process what CUDA and its libraries take beside it.
Captured calls get what is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.interface import device_of
from penstock.ir.cluster.gpus import CONTEXT, WORKSPACES
from penstock.ir.graph import Module
from penstock.ir.memory.captured import captured_room, ranks_beside
from penstock.ir.memory.predict import measure_memory
from penstock.support.errors import UsageError
from penstock.support.words import shown_bytes

if TYPE_CHECKING:
    import torch


def find_device(architecture: str, gpu: str, stage: int) -> torch.device:
    """Return the GPU for a stage; UsageError says what the stage needs and what this host has."""
    import torch  # lazy: heavy

    where = f"stage {stage}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(f"wants cuda {architecture}; this host has none", where=where, hint=_reason_for_none())
    number = _number_of(gpu, count)
    if number is None:
        listed = ", ".join(f"{i} is GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count))
        raise UsageError(
            f"wants cuda {architecture}, device {gpu} of its host; this host has {count}: {listed}",
            where=where,
            hint="`gpu =` in the cluster file names it; CUDA_VISIBLE_DEVICES chooses and orders what a process sees",
        )
    capability = torch.cuda.get_device_capability(number)
    digits = re.sub(r"\D", "", architecture)
    required = (int(digits[:-1]), int(digits[-1]))
    # Machine code runs on its own major number, from its minor number on; that of an architecture with a letter only
    # on itself.
    fits = (
        capability == required
        if architecture[-1].isalpha()
        else capability[0] == required[0] and capability[1] >= required[1]
    )
    if not fits:
        name = torch.cuda.get_device_name(number)
        raise UsageError(
            f"wants cuda {architecture}; device {number} of this host is {name}, sm_{capability[0]}{capability[1]}",
            where=where,
            hint=f'compile with arch = "sm_{capability[0]}{capability[1]}"',
        )
    return torch.device("cuda", number)


def _reason_for_none() -> str:
    """Return why torch has no CUDA device, in the driver's words where it says so."""
    import torch  # lazy: heavy

    if torch.version.cuda is None:
        return "the installed torch is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"torch finds no CUDA device: {str(error).strip().splitlines()[0]}"
    return "torch finds no CUDA device: CUDA_VISIBLE_DEVICES may hide them"


def _number_of(gpu: str, count: int) -> int | None:
    """Return the number under which torch opens a GPU; None where it does not see it."""
    import torch  # lazy: heavy

    if gpu.isdecimal():
        return int(gpu) if int(gpu) < count else None
    uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}".lower() for i in range(count)]
    fitting = [i for i, uuid in enumerate(uuids) if uuid.startswith(gpu.lower())]
    return fitting[0] if len(fitting) == 1 else None


def check_memory(module: Module, stage: int, gpu: torch.device, device: str | None = None) -> None:
    """Raise a UsageError where the stages of a plan do not fit on a GPU, beside what else is there."""
    if (planned := _planned(module, stage, device)) is None:
        return
    memory = _memory_of(gpu)
    needed = planned.peaks[planned.rank] + WORKSPACES
    if needed > memory.free:
        raise UsageError(
            f"needs {shown_bytes(needed)} on {gpu}, of which {shown_bytes(memory.free)} of "
            f"{shown_bytes(memory.total)} are free",
            where=f"stage {stage}",
            hint="end other programs on this GPU, or plan for less memory: `memory` in the cluster file",
        )
    if len(planned.peaks) > 1 and planned.of_all > memory.total:
        raise UsageError(
            f"{len(planned.peaks)} ranks on {gpu} need {shown_bytes(planned.of_all)}, it has "
            f"{shown_bytes(memory.total)}",
            where=f"stage {stage}",
            hint="give one of them another GPU, or plan for less memory: `memory` in the cluster file",
        )


def room_for_captures(module: Module, stage: int, gpu: torch.device, device: str | None = None) -> int | None:
    """Return the bytes that captured calls of a stage may keep: what the plan has for them, as far as it is there
    beside what the plan needs. None where no plan says."""
    if (planned := _planned(module, stage, device)) is None:
        return None
    memory = _memory_of(gpu)
    left = memory.free - planned.peaks[planned.rank] - WORKSPACES
    if len(planned.peaks) > 1:
        left = min(left, (memory.total - planned.of_all) // len(planned.peaks))
    return captured_room(module, planned.rank, left).get(stage, 0)


class _GpuMemory(NamedTuple):
    """The bytes of a GPU that are free, and all of them."""

    free: int
    total: int


@dataclass(frozen=True)
class _PlannedRanks:
    """The rank of a stage on a GPU, and the planned peaks of all ranks there."""

    rank: int
    peaks: Mapping[int, int]

    @property
    def of_all(self) -> int:
        """The bytes of all of them, with what CUDA and its libraries take in each process."""
        return sum(peak + WORKSPACES + CONTEXT for peak in self.peaks.values())


def _memory_of(gpu: torch.device) -> _GpuMemory:
    import torch  # lazy: heavy

    return _GpuMemory(*torch.cuda.mem_get_info(gpu))


def _planned(module: Module, stage: int, device: str | None) -> _PlannedRanks | None:
    """Return what a plan says of the GPU of a stage; None where there is no plan."""
    if module.schedule is None or module.cluster is None:
        return None
    home = device_of(module, stage, device)
    assert home is not None
    memory, devices = measure_memory(module), module.rank_devices()
    rank = next(rank for rank in memory if devices[rank] == home.name)
    # Ranks of one host see their GPUs alike, so equal words mean one GPU.
    return _PlannedRanks(rank, {other: memory[other].peak for other in ranks_beside(module, home)})
