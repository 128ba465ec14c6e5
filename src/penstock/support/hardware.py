"""The hardware of this machine: cores, threads, caches, memory within the limits of control groups, and NVIDIA devices.

Out: plain facts, read and not measured; an unknown fact is None or empty. GPUs are read through nvidia-ml-py when it is
installed; otherwise the reason is returned, not guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, with the bytes of its memory and its bandwidth in bytes per second, 0 where the driver does not say.
    `index` counts the devices that CUDA shows to this process; the UUID is the same for all processes."""

    index: int
    arch: str
    memory: int
    bandwidth: float = 0.0
    uuid: str = ""


def usable_cores() -> int:
    """Count the cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Return the mean number of programs at work over the last minute; 0 where the machine does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


class CoreQuota(NamedTuple):
    """So many `cores`' worth of time, granted anew after each `period` in seconds."""

    cores: float
    period: float


def core_quota() -> CoreQuota | None:
    """Return the time that the narrowest control group of this process allows; None without a limit."""
    limits = []
    for path in _groups("cpu.max"):
        quota, _, period = _read(path).partition(" ")
        with suppress(ValueError):
            limits.append(CoreQuota(float(quota) / float(period), float(period) / 1e6))
    for path in _groups("cpu.cfs_quota_us", "cpu"):
        with suppress(ValueError):
            quota_us, period_us = int(_read(path)), int(_read(path.parent / "cpu.cfs_period_us"))
            limits += [CoreQuota(quota_us / period_us, period_us / 1e6)] if quota_us > 0 else []
    return min(limits, default=None)


def physical_memory() -> int:
    """Return the bytes of the machine; 0 where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def memory_limit() -> int | None:
    """Return the bytes that the control group allows; None without a limit."""
    limits = []
    for path in (*_groups("memory.max"), *_groups("memory.limit_in_bytes", "memory")):
        with suppress(ValueError):
            limits.append(int(_read(path)))
    physical = physical_memory()
    real = [limit for limit in limits if not physical or limit < physical]
    return min(real, default=None)


def usable_memory() -> int:
    """Return the bytes that all programs here may use together; 0 where the machine does not say."""
    return memory_limit() or physical_memory()


def free_memory() -> int | None:
    """Return the bytes that are free, within the limit."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    free = int(match[1]) * 1024 if match else None
    limit, used = memory_limit(), _used_in_group()
    if limit is not None and used is not None:
        free = max(0, limit - used) if free is None else min(free, max(0, limit - used))
    return free


def processor_name() -> str:
    """Return the name of the processor; empty where the machine does not say."""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else ""


def caches() -> dict[str, int]:
    """Return the bytes of each cache of the first core by level: L1d, L2, L3."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(folder / name) for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KM]?)", size)
        if level and match and kind != "Instruction":
            sizes[f"L{level}{'d' if kind == 'Data' else ''}"] = (
                int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]]
            )
    return sizes


def gpus() -> tuple[list[Gpu], str]:
    """Return the NVIDIA devices that CUDA shows to this process, and the reason why there are none, if so.

    The driver lists all devices in the order of the bus; CUDA_VISIBLE_DEVICES chooses among them. Limit: where models
    differ, CUDA puts the fastest first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID. Numbers are those of the bus then, so
    UUIDs are what plans should name.
    """
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        has_devices = any(Path("/dev").glob("nvidia[0-9]*"))
        hint = "nvidia-ml-py is not installed, so GPUs cannot be asked for"
        return [], f"there is an NVIDIA device, but {hint} (pip install 'penstock[gpu]')" if has_devices else hint
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver answers: {error}"
    try:
        devices = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver does not say what devices there are: {error}"
    finally:
        pynvml.nvmlShutdown()
    if not devices:
        return [], "the NVIDIA driver has no devices"
    shown = visible_gpus(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return shown, "" if shown else "CUDA_VISIBLE_DEVICES hides all NVIDIA devices"


def visible_gpus(devices: Sequence[Gpu], choice: str | None) -> list[Gpu]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES shows, in its order and with new numbers. As in CUDA, it
    names them by number or by the beginning of their UUID, and ends at the first name that fits no single device."""
    if choice is None:
        return list(devices)
    shown: list[Gpu] = []
    for word in (part.strip() for part in choice.split(",")):
        fitting = [g for g in devices if word == str(g.index) or (word.startswith("GPU-") and g.uuid.startswith(word))]
        if len(fitting) != 1 or fitting[0] in shown:
            break
        shown += fitting
    return [replace(gpu, index=i) for i, gpu in enumerate(shown)]


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: str, *arguments: object) -> Any:
        """Query the device; return None for a query that it does not support."""
        try:
            return getattr(nvml, question)(handle, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_Unknown):
            return None

    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    clock, width = ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM), ask("nvmlDeviceGetMemoryBusWidth")
    # Memory moves data twice per clock.
    bandwidth = 2.0 * clock * 1e6 * width / 8 if clock and width else 0.0
    uuid = ask("nvmlDeviceGetUUID") or ""
    name = uuid.decode() if isinstance(uuid, bytes) else uuid
    return Gpu(index, f"sm_{major}{minor}", int(memory.total), bandwidth, name)


# ------------------------------------------------------------------------------------------------ control groups


def _groups(name: str, controller: str = "") -> list[Path]:
    """Return a file of the control group of this process and of those above it, the nearest first.

    The groups are those of version 2, or of a controller of version 1.
    """
    named = rf"[0-9]+:(?:[^:\n]*,)?{controller}(?:,[^:\n]*)?" if controller else "0:"
    match = re.search(rf"^{named}:(/.*)$", _read(Path("/proc/self/cgroup")), re.MULTILINE)
    top = _CGROUP / controller
    folder = top / (match[1].strip("/") if match else "")
    folders = [folder, *folder.parents]
    return [f / name for f in folders if f == top or top in f.parents if (f / name).is_file()]


def _used_in_group() -> int | None:
    """Return the bytes that the group uses, without files in memory that the system would drop."""
    for path in (*_groups("memory.current"), *_groups("memory.usage_in_bytes", "memory")):
        with suppress(ValueError):
            files = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(path.parent / "memory.stat"), re.MULTILINE)
            return max(0, int(_read(path)) - (int(files[1]) if files else 0))
    return None


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
