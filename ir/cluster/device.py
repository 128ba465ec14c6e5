"""Devices of a cluster: what each can do, and what it holds.

In: fields of a file or of a module's text, the name of an architecture, or a GPU of this machine. Out: a `Device`, with
the usual figures for what is not said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from penstock.ir.attrs import Scalar
from penstock.support.hardware import Gpu

from .gpus import CONTEXT, WORKSPACES, usual_settings
from .quantities import MOST_THREADS, refuse_unknown

KINDS = {"cpu": "ram", "cuda": "hbm"}
_ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[af]?")
# Operations per second of one thread of a processor, and bytes per second of its memory, where the file has none.
THREAD_FLOPS, CPU_BANDWIDTH = 5e10, 1e10
# Seconds of a kernel's launch, and of a call of a stage, where nothing was measured.
KERNEL_OVERHEAD, CALL_OVERHEAD = 1e-6, 5e-5
# Seconds of a rank for one end of a message, and bytes per second that a core moves into or out of a socket: gloo on
# one host (benchmarks/truth.py --calibrate).
MESSAGE_OVERHEAD, SOCKET_BANDWIDTH = 6e-5, 2.2e9
# The same of messages through memory that both ranks share, whose bytes the sender copies (penstock doctor,
# on the machine of docs/performance.md).
SHARED_OVERHEAD, COPY_BANDWIDTH = 2e-5, 7e9
# The source of rates that were measured on the device.
MEASURED = "measured"
EFFICIENCY_PREFIX = "efficiency."


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a cluster: its host, its memory and its rates. `spaces` are (name, bytes) pairs; the first one holds
    tensors. `flops` (of a large float32 product) and `bandwidth` are rates of one device, all threads. What fits into
    `cache` bytes moves at `cache_bandwidth` (0: nothing does). `efficiency` are shares of the rates that families of
    work reach (passes/costs/prices.py), by name. `overhead` are seconds that a kernel takes beside its work,
    `call_overhead` those that a call of a stage takes beside its kernels. An end of a message takes `message_overhead`,
    and on a CPU its bytes take processor time at `socket_bandwidth`. In memory of one host an end takes
    `shared_overhead`, and the sender copies its bytes at `copy_bandwidth`. `gpu` is the number or the UUID of a GPU on
    its host; several devices may be one GPU. The `source` of rates is `measured` where `penstock doctor` or a plan
    measured them. A `quota` may leave a part of the time of its threads: rates are those within it, and the device
    takes no more of the cores of its host. It is granted anew after each `quota_period` (0: evenly), within which a
    device may use what it left while it waited."""

    name: str
    kind: str = "cpu"
    host: str = "localhost"
    target: str = "native"
    threads: int = 1
    flops: float = THREAD_FLOPS
    bandwidth: float = CPU_BANDWIDTH
    spaces: tuple[tuple[str, int], ...] = ()
    cache: int = 0
    cache_bandwidth: float = 0.0
    overhead: float = KERNEL_OVERHEAD
    call_overhead: float = CALL_OVERHEAD
    efficiency: tuple[tuple[str, float], ...] = ()
    message_overhead: float = MESSAGE_OVERHEAD
    socket_bandwidth: float = SOCKET_BANDWIDTH
    shared_overhead: float = SHARED_OVERHEAD
    copy_bandwidth: float = COPY_BANDWIDTH
    gpu: str = ""
    source: str = ""
    quota: float = 1.0
    quota_period: float = 0.0

    def fields(self) -> dict[str, Scalar]:
        """Return the fields of a device as its file and a module's text list them; rare fields only where they are not
        the usual ones."""
        always = ("kind", "host", "target", "threads", "flops", "bandwidth")
        settings = {key: getattr(self, key) for key in always}
        settings |= {key: getattr(self, key) for key in SELDOM if getattr(self, key) != _USUAL[key]}
        return settings | {f"{EFFICIENCY_PREFIX}{key}": share for key, share in self.efficiency}

    @staticmethod
    def from_fields(name: str, given: Mapping[str, Scalar], spaces: tuple[tuple[str, int], ...]) -> Device:
        shares = tuple(
            (k.removeprefix(EFFICIENCY_PREFIX), v) for k, v in given.items() if k.startswith(EFFICIENCY_PREFIX)
        )
        plain = {k: v for k, v in given.items() if not k.startswith(EFFICIENCY_PREFIX)}
        refuse_unknown(plain, Device)
        if (threads := plain.get("threads", 1)) not in range(1, MOST_THREADS + 1):
            raise ValueError(f"threads must be 1 to {MOST_THREADS}, got {threads}")
        if problem := quota_problem(plain.get("kind", "cpu"), plain.get("quota", 1.0), plain.get("quota_period", 0.0)):
            raise ValueError(problem)
        return Device(name, **plain, spaces=spaces, efficiency=shares)  # type: ignore[arg-type]

    @property
    def gpu_on_host(self) -> str:
        """The GPU of its host that a device is: what `gpu` says, else the number at the end of its name, else the
        first."""
        number = re.search(r"[0-9]+$", self.name)
        return self.gpu or (str(int(number[0])) if number else "0")

    @property
    def memory(self) -> int | None:
        """Bytes of the space that holds tensors; None when unlimited."""
        return self.spaces[0][1] if self.spaces else None

    @property
    def taken(self) -> int:
        """Bytes that each process takes of a GPU for CUDA and its libraries, beside what a module holds."""
        return CONTEXT + WORKSPACES if self.kind == "cuda" else 0

    @property
    def room(self) -> int | None:
        """Bytes that are left for what a module holds; None when unlimited."""
        return max(self.memory - self.taken, 1) if self.memory else self.memory


def quota_problem(kind: object, quota: object, period: object) -> str:
    """Say what is wrong with the quota of a device of a kind, and with its period; "" if nothing is."""
    if not isinstance(quota, int | float) or not 0 < quota <= 1:
        return f"a quota must be above 0 and at most 1, got {quota}"
    if not isinstance(period, int | float) or not 0 <= period < math.inf:
        return f"a quota_period is 0 seconds or more, got {period}"
    if kind == "cuda" and (quota < 1 or period):
        return "a quota is for cpu devices"
    return "a quota_period without a quota says nothing" if period and quota == 1 else ""


# The purpose of bytes that a GPU has `taken`, in lists of what a device holds.
TAKEN = "CUDA and its libraries"
# Settings that are written only where they differ from the default.
SELDOM = (
    "cache",
    "cache_bandwidth",
    "overhead",
    "call_overhead",
    "message_overhead",
    "socket_bandwidth",
    "shared_overhead",
    "copy_bandwidth",
    "gpu",
    "source",
    "quota",
    "quota_period",
)
_USUAL = {f.name: f.default for f in fields(Device)}


def is_architecture(name: str) -> bool:
    """Return whether a name has the form of NVIDIA's architectures: sm_90, sm_90a, sm_120."""
    return _ARCHITECTURE.fullmatch(name) is not None


def cuda_device(name: str, target: str) -> Device:
    """Return a GPU of an architecture, with the rates of its usual card."""
    return Device(name, "cuda", target=target, **usual_settings(target))  # type: ignore[arg-type]


def device_of_gpu(gpu: Gpu) -> Device:
    """Return a device for a GPU of this machine, with the rates of its architecture and what its driver says."""
    device = cuda_device(f"cuda:{gpu.index}", gpu.arch)
    spaces = (("hbm", gpu.memory),) if gpu.memory else ()
    return replace(device, bandwidth=gpu.bandwidth or device.bandwidth, spaces=spaces, gpu=gpu.uuid)
