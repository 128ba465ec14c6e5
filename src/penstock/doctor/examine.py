"""The examination of this machine: what it is and can do, measured, and a cluster file of it.

In: how many devices, or the threads of each; started on several hosts (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
torchrun sets them) also the group. Out: a `DoctorReport`: versions, facts of every host, the cluster with measured
rates, and problems in plain words.

    devices    each in a process of its own with its threads, all at once: they compute at once in a pipeline, too
               (kernels.py)
    links      messages between two processes of this machine, and what their ends take of them; of several hosts, every
               pair (links.py): the median is their class, a pair that is more than a fifth off gets links of its own,
               and a host's network card has the rate of its fastest pair
    GPUs       by nvidia-ml-py; rates, launches, and copies between them and with the host, in a process of its own
               (gpu_rates.py), where torch sees them, and else the rates of their data sheets
    disks      what CPU devices reach of the disk of the folder for temporary files (ways.py)

Limits: the load of other programs meanwhile is measured along. Pairs of hosts are
measured one at a time.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import msgspec

from penstock.ir.cluster.cluster import (
    HOST_TO_DEVICE,
    OTHER_HOST,
    SAME_HOST,
    Cluster,
    Device,
    Host,
    Link,
    LinkClass,
    device_of_gpu,
)
from penstock.ir.cluster.spaces import Space
from penstock.runtime.group.group import RankGroup
from penstock.runtime.group.hosts import in_group, place_of
from penstock.runtime.group.meet import join_environment
from penstock.runtime.launch.local import thread_environment
from penstock.runtime.state.home_folders import folder_of, in_memory
from penstock.support import hardware as machine
from penstock.support.errors import PenstockError, UsageError
from penstock.support.helper_processes import failure, outputs, start
from penstock.support.processes import command_of

from .gpu_rates import GpuEdge, HostGpus, measure_gpus, with_gpu_rates
from .kernels import BUSY, Rates, compile_yardsticks, granted, with_rates, within
from .links import Loopback, Wire, fit, measure_loopback, measure_pairs
from .ways import measured_bandwidth

Say = Callable[[str], None]
PACKAGES = ("penstock", "apache-tvm", "apache-tvm-ffi", "torch", "numpy", "onnx", "onnxruntime", "nvidia-ml-py")
_MEASURE_TIMEOUT = 120.0
# Pairs of hosts that differ by more than this from their class are listed one by one.
_ALIKE = 0.2
# The name of the memory space that a file of the cluster has for each host.
DISK = "disk"


class HostFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One host: its hardware, its measurements, and its problems."""

    name: str
    address: str
    versions: dict[str, str]
    processor: str
    cores: int
    quota: float | None
    caches: dict[str, int]
    memory: int
    free: int | None
    devices: list[dict[str, object]]
    # Bytes per second and seconds of messages on this host, and of copies to a GPU; None if not measured.
    loopback: tuple[float, float] | None
    copies: tuple[float, float] | None
    problems: list[str]
    # Seconds of messages by size, one way, and seconds of a rank for one end, over gloo and in shared memory.
    loopback_times: list[tuple[int, float]] = []
    end_times: list[tuple[int, float]] = []
    shared_end_times: list[tuple[int, float]] = []
    # Copies between GPUs.
    gpu_edges: list[GpuEdge] = []
    # Bytes per second in each direction between a device and the disk of the folder for temporary files.
    disk: float | None = None


@dataclass(frozen=True)
class DoctorReport:
    """All hosts, the cluster they are, and the seconds it took."""

    hosts: tuple[HostFacts, ...]
    cluster: Cluster
    pairs: dict[tuple[int, int], Wire]
    seconds: float

    @property
    def problems(self) -> list[str]:
        return [
            f"{host.name}: {problem}" if len(self.hosts) > 1 else problem
            for host in self.hosts
            for problem in host.problems
        ]


def examine(
    threads: Sequence[int] = (), count: int | None = None, say: Say = lambda text: None, timeout: float = 60.0
) -> DoctorReport | None:
    """Measure this machine, and with the hosts of a group that torchrun started, all of them; None on all ranks but the
    first."""
    begin = time.monotonic()
    planned = Cluster.local(count, threads)
    # Before anything is measured: the environment of a launcher may be wrong.
    joined = in_group() and place_of().world > 1
    host = _examine_host(planned, say, timeout)
    if not joined:
        return DoctorReport((host,), cluster_of((host,), {}), {}, time.monotonic() - begin)

    say("meeting the other hosts")
    store, rank, world = join_environment(timeout)
    group = RankGroup(store, rank, world, timeout)
    group.connect()
    try:
        say("links to the other hosts")
        times = measure_pairs(group)
        hosts = _named_apart(
            [msgspec.json.decode(part, type=HostFacts) for part in group.gather("doctor", msgspec.json.encode(host))]
        )
        # The meeting point may live in rank 0: no rank leaves before all have read.
        group.gather("doctor/read", b"")
    finally:
        group.leave()
    if rank:
        return None
    pairs = {pair: fit(sizes) for pair, sizes in times.items()}
    return DoctorReport(hosts, cluster_of(hosts, pairs), pairs, time.monotonic() - begin)


def _named_apart(hosts: Sequence[HostFacts]) -> tuple[HostFacts, ...]:
    """Append the rank to the name of hosts with equal names, such as processes of one machine."""
    names = [host.name for host in hosts]
    return tuple(
        msgspec.structs.replace(host, name=f"{host.name}-{rank}") if names.count(host.name) > 1 else host
        for rank, host in enumerate(hosts)
    )


# ------------------------------------------------------------------------------------------------ one host


def _examine_host(planned: Cluster, say: Say, timeout: float) -> HostFacts:
    problems: list[str] = []
    cores, quota = machine.usable_cores(), machine.core_quota()
    wanted = sum(d.threads for d in planned.devices)
    if wanted > cores:
        problems.append(f"the devices have {wanted} threads, but {cores} cores may be used: they slow each other down")
    part = granted(quota, wanted)
    if quota is not None and part < 1:
        problems.append(
            f"the control group allows {quota.cores:g} cores' worth of time, the devices have {wanted} threads: "
            "rates are those within it"
        )
    load = machine.load()
    if load > BUSY * cores:
        problems.append(
            f"other programs keep {load:.1f} of {cores} cores busy: times of several threads and of links are too long"
        )
    rates = _measured_rates([device.threads for device in planned.devices], part, say, problems)
    # Where nothing could be measured, devices stay as they were planned.
    pairs = zip(planned.devices, rates, strict=True) if rates else ()
    devices = [with_rates(within(quota, wanted, d), measured) for d, measured in pairs] or list(planned.devices)
    gpus, why = machine.gpus()
    if why and (gpus or any(Path("/dev").glob("nvidia[0-9]*")) or "not installed" not in why):
        problems.append(f"GPUs: {why}")
    on_gpus = _measured_gpus(gpus, say)
    problems += on_gpus.problems
    devices += [_gpu_with_rates(gpu, on_gpus) for gpu in gpus]
    say("messages between two processes of this machine")
    loopback = Loopback([], [], [])
    try:
        loopback = measure_loopback(timeout)
    except (PenstockError, OSError) as error:
        problems.append(str(error))
    if loopback.ends:
        devices = _with_ends(devices, loopback, granted(quota, len(planned.devices)))
    disk = _measured_disk(say, problems)
    return HostFacts(
        socket.gethostname(),
        os.environ.get("PENSTOCK_ADDRESS", ""),
        _versions(),
        machine.processor_name(),
        cores,
        None if quota is None else quota.cores,
        machine.caches(),
        machine.usable_memory(),
        machine.free_memory(),
        [_plain(device) for device in devices],
        tuple(_rounded(fit(loopback.times))) if loopback.times else None,  # type: ignore[arg-type]
        on_gpus.copies,
        problems,
        loopback.times,
        loopback.ends,
        loopback.shared_ends,
        on_gpus.edges,
        disk,
    )


def _with_ends(devices: Sequence[Device], loopback: Loopback, part: float) -> list[Device]:
    """Return devices with what an end of a message takes of them. That is processor time, of one thread, however many a
    device has. Where a quota leaves a part of it, ends take longer by the wait for it."""
    socket_bandwidth, overhead = _rounded(fit([(size, seconds / part) for size, seconds in loopback.ends]))
    devices = [replace(d, message_overhead=overhead, socket_bandwidth=socket_bandwidth) for d in devices]
    copied, overhead = _rounded(
        fit([(size, seconds / part) for size, seconds in loopback.shared_ends or loopback.ends])
    )
    # One of the two ends copies.
    return [replace(d, shared_overhead=overhead, copy_bandwidth=copied / 2) for d in devices]


def _measured_disk(say: Say, problems: list[str]) -> float | None:
    """Measure the way to the disk of the folder for temporary files; nothing where its files lie in memory."""
    space = Space(DISK)
    folder = folder_of(space)
    if in_memory(folder):
        return None
    say(f"the way to {folder}")
    try:
        return measured_bandwidth(space)
    except (PenstockError, OSError) as error:
        problems.append(f"the way to {folder} could not be measured: {error}")
        return None


def _measured_gpus(gpus: Sequence[machine.Gpu], say: Say) -> HostGpus:
    """Measure GPUs, if there are any."""
    if not gpus:
        return HostGpus()
    say(f"measuring {len(gpus)} GPUs")
    return measure_gpus(gpus)


def _gpu_with_rates(gpu: machine.Gpu, measured: HostGpus) -> Device:
    """Return a GPU with its measured rates, or those of its sheet where there are none."""
    device, rates = device_of_gpu(gpu), measured.rates.get(gpu.index)
    return device if rates is None else with_gpu_rates(device, rates)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _measured_rates(threads: Sequence[int], part: float, say: Say, problems: list[str]) -> list[Rates]:
    """Return the rates of devices of so many threads, measured all at once, within the part of their time that a quota
    leaves. Where that fails, there are none, and a problem."""
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as name:
        folder = Path(name)
        say("compiling kernels to measure with")
        try:
            compile_yardsticks(folder)
            say(f"measuring {len(threads)} devices with {', '.join(map(str, threads))} threads, all at once")
            return _run_yardsticks(folder, threads, part)
        except (PenstockError, ImportError, OSError) as error:
            problems.append(f"nothing could be measured, rates are guesses: {error}")
            return []


def _run_yardsticks(folder: Path, threads: Sequence[int], part: float) -> list[Rates]:
    running = [
        start(
            [*command_of("yardsticks"), str(folder), "--threads", str(count), "--part", repr(part)],
            os.environ | thread_environment(count),
        )
        for count in threads
    ]
    written = outputs(running, _MEASURE_TIMEOUT)
    if written is None:
        raise PenstockError(f"measuring did not end within {_MEASURE_TIMEOUT:g} s", where="doctor")
    if (problem := failure(running, written)) is not None:
        raise PenstockError(f"measuring failed:\n{problem}", where="doctor")
    return [msgspec.json.decode(out, type=Rates) for out, _ in written]


# ------------------------------------------------------------------------------------------------ the cluster


def cluster_of(hosts: Sequence[HostFacts], pairs: dict[tuple[int, int], Wire]) -> Cluster:
    """Return the devices of all hosts with what was measured of them and between them."""
    several = len(hosts) > 1
    devices: list[Device] = []
    names: list[list[str]] = []
    for host in hosts:
        described = [_device(plain) for plain in host.devices]
        named = [replace(d, name=f"{host.name}/{d.name}", host=host.name) for d in described] if several else described
        devices += named
        names.append([d.name for d in named])
    classes = []
    loops = [host.loopback for host in hosts if host.loopback is not None]
    copies = [host.copies for host in hosts if host.copies is not None]
    for kind, wires in ((SAME_HOST, loops), (OTHER_HOST, list(pairs.values())), (HOST_TO_DEVICE, copies)):
        if wires:
            classes.append(
                LinkClass(kind, *_rounded(Wire(*(statistics.median(part) for part in zip(*wires, strict=True)))))
            )
    links: list[Link] = []
    for host, of_host in zip(hosts, names, strict=True):
        on_gpus = [name for name, plain in zip(of_host, host.devices, strict=True) if _device(plain).kind == "cuda"]
        links += [Link(on_gpus[e.source], on_gpus[e.target], e.bandwidth, e.latency) for e in host.gpu_edges]
    usual = next((c for c in classes if c.kind == OTHER_HOST), None)
    for (a, b), wire in sorted(pairs.items()):
        assert usual is not None
        if any(abs(x / y - 1) > _ALIKE for x, y in zip(wire, (usual.bandwidth, usual.latency), strict=True) if y):
            links += [Link(x, y, *_rounded(wire)) for x in names[a] for y in names[b]]
    named_hosts = (
        tuple(Host(h.name, h.address, nic_bandwidth=_rounded(_fastest(i, pairs))[0]) for i, h in enumerate(hosts))
        if several
        else ()
    )
    disks = [Space(DISK, host.name if several else "", bandwidth=host.disk) for host in hosts if host.disk]
    return Cluster(tuple(devices), tuple(links), named_hosts, tuple(classes), tuple(disks))


def _fastest(host: int, pairs: dict[tuple[int, int], Wire]) -> Wire:
    return max((wire for pair, wire in pairs.items() if host in pair), default=Wire(0.0, 0.0))


def _rounded(wire: Wire) -> Wire:
    return Wire(*(float(f"{part:.3g}") for part in wire))


def _plain(device: Device) -> dict[str, object]:
    return {"name": device.name, "fields": device.fields(), "spaces": dict(device.spaces)}


def _device(plain: dict[str, object]) -> Device:
    name, fields, spaces = plain["name"], plain["fields"], plain["spaces"]
    if not isinstance(name, str) or not isinstance(fields, dict) or not isinstance(spaces, dict):
        raise UsageError(
            f"another host describes a device as {plain!r:.200}", hint="start the same version on all hosts"
        )
    return Device.from_fields(name, fields, tuple((str(k), int(v)) for k, v in spaces.items()))
