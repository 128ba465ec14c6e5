"""The cluster: devices with their memory spaces and rates, and the links between them.

A cluster file is TOML, with one table per device and per link; every key but the name has a default:

    [[device]]                          [[link]]
    name = "cpu:0"                      a = "cpu:0"
    kind = "cpu"          # or cuda     b = "cpu:1"
    host = "localhost"                  bandwidth = 2e9     # bytes per second
    threads = 1                         latency = 5e-5      # seconds
    memory = "8 GiB"      # or bytes    nic = ""            # links with the same NIC share its bandwidth
    flops = 5e10          # float32 operations per second
    bandwidth = 1e10      # memory, bytes per second
    target = "native"     # code generation target

A device of kind cuda (or gpu) says `arch = "sm_90"` instead of a target, as NVIDIA names the architecture; its rates are by default those of
the usual card of that architecture. Pairs of devices without a link entry get the defaults of their kind of connection: same host, or another host.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import UsageError
from .graph import Scalar

KINDS = {"cpu": "ram", "cuda": "hbm"}
_ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[af]?")
# Float32 operations and bytes per second by data sheet (A100, A40, L40S, H100): what a plan starts from when the file does not say.
CUDA_RATES = {"sm_80": (1.95e13, 1.55e12), "sm_86": (3.74e13, 6.96e11), "sm_89": (9.16e13, 8.64e11), "sm_90": (6.7e13, 3.35e12)}
SAME_HOST = (2e9, 5e-5)
OTHER_HOST = (1e9, 2e-4)
# Seconds of a kernel's launch, and of a call of a stage, where nothing was measured.
KERNEL_OVERHEAD, CALL_OVERHEAD = 1e-6, 5e-5
EFFICIENCY_PREFIX = "efficiency."
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class Device:
    """`spaces` are (name, bytes) pairs; the first one holds tensors. `flops` (of a large float32 product) and `bandwidth` are rates of one device,
    all threads. `efficiency` are shares of them that families of work reach (passes/cost.py), by name. `overhead` are seconds that a kernel takes
    beside its work, `call_overhead` those that a call of a stage takes beside its kernels."""

    name: str
    kind: str = "cpu"
    host: str = "localhost"
    target: str = "native"
    threads: int = 1
    flops: float = 5e10
    bandwidth: float = 1e10
    spaces: tuple[tuple[str, int], ...] = ()
    overhead: float = KERNEL_OVERHEAD
    call_overhead: float = CALL_OVERHEAD
    efficiency: tuple[tuple[str, float], ...] = ()

    def fields(self) -> dict[str, Scalar]:
        """What text says of a device: the overheads only where they are not the usual ones."""
        measured: dict[str, Scalar] = {}
        if self.overhead != KERNEL_OVERHEAD:
            measured["overhead"] = self.overhead
        if self.call_overhead != CALL_OVERHEAD:
            measured["call_overhead"] = self.call_overhead
        return {
            "kind": self.kind,
            "host": self.host,
            "target": self.target,
            "threads": self.threads,
            "flops": self.flops,
            "bandwidth": self.bandwidth,
            **measured,
            **{f"{EFFICIENCY_PREFIX}{key}": share for key, share in self.efficiency},
        }

    @staticmethod
    def from_fields(name: str, given: Mapping[str, Scalar], spaces: tuple[tuple[str, int], ...]) -> Device:
        shares = tuple((k.removeprefix(EFFICIENCY_PREFIX), v) for k, v in given.items() if k.startswith(EFFICIENCY_PREFIX))
        plain = {k: v for k, v in given.items() if not k.startswith(EFFICIENCY_PREFIX)}
        _refuse_unknown(plain, Device)
        return Device(name, **plain, spaces=spaces, efficiency=shares)  # type: ignore[arg-type]

    @property
    def memory(self) -> int | None:
        """Bytes of the space that holds tensors; None when unlimited."""
        return self.spaces[0][1] if self.spaces else None


@dataclass(frozen=True, slots=True)
class Link:
    """A two-way connection; links with the same `nic` share its bandwidth."""

    a: str
    b: str
    bandwidth: float = SAME_HOST[0]
    latency: float = SAME_HOST[1]
    nic: str = ""

    def fields(self) -> dict[str, Scalar]:
        return {"bandwidth": self.bandwidth, "latency": self.latency} | ({"nic": self.nic} if self.nic else {})

    @staticmethod
    def from_fields(a: str, b: str, given: Mapping[str, Scalar]) -> Link:
        _refuse_unknown(given, Link)
        return Link(a, b, **given)  # type: ignore[arg-type]


def _refuse_unknown(given: Mapping[str, Scalar], kind: type) -> None:
    known = {f.name: f.type for f in fields(kind)}
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {key!r}, expected one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Cluster:
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def device(self, name: str) -> Device:
        for device in self.devices:
            if device.name == name:
                return device
        raise UsageError(f"no device {name!r} in the cluster", hint=f"it has {', '.join(d.name for d in self.devices)}")

    def link(self, a: str, b: str) -> Link:
        """The connection between two devices, by entry or by default."""
        for link in self.links:
            if {link.a, link.b} == {a, b}:
                return link
        same = self.device(a).host == self.device(b).host
        return Link(a, b, *(SAME_HOST if same else OTHER_HOST))

    @staticmethod
    def local(count: int) -> Cluster:
        """`count` equal CPU devices on this machine, sharing its threads and memory evenly."""
        if count < 1:
            raise UsageError(f"a cluster needs at least one device, got {count}")
        threads = max(1, usable_cores() // count)
        memory = _physical_memory() // count // 2**30 * 2**30
        spaces = (("ram", memory),) if memory else ()
        return Cluster(tuple(Device(f"cpu:{i}", threads=threads, flops=5e10 * threads, spaces=spaces) for i in range(count)))

    @staticmethod
    def listed(names: str) -> Cluster:
        """Devices of this machine, by a list such as `cpu,sm_90,sm_90`: CPU devices share its threads, architectures stand for its GPUs in order."""
        words = [word.strip() for word in names.split(",")]
        bad = [word for word in words if word != "cpu" and not is_architecture(word)]
        if bad:
            raise UsageError(
                f"unknown device {bad[0]!r}", hint="a number of CPU devices, or a list of `cpu` and CUDA architectures: cpu,sm_90"
            )
        cpus = iter(Cluster.local(max(words.count("cpu"), 1)).devices)
        devices: list[Device] = []
        for word in words:
            number = sum(d.kind == "cuda" for d in devices)
            devices.append(next(cpus) if word == "cpu" else _cuda_device(f"cuda:{number}", word))
        return Cluster(tuple(devices))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file; one UsageError lists everything that is wrong with it."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"cannot read the cluster: {error}", where=str(path)) from error
        return _ClusterReader(str(path)).read(data)

    def to_toml(self) -> str:
        """The cluster file that `load` reads back as this cluster."""
        lines: list[str] = []
        for device in self.devices:
            lines += ["[[device]]", f'name = "{device.name}"', *_toml_fields(device.fields())]
            lines += [f"memory = {size}" for _, size in device.spaces[:1]] + [""]
        for link in self.links:
            lines += ["[[link]]", f'a = "{link.a}"', f'b = "{link.b}"', *_toml_fields(link.fields()), ""]
        return "\n".join(lines)


def is_architecture(name: str) -> bool:
    """Whether a name has the form of NVIDIA's architectures: sm_90, sm_90a, sm_120."""
    return _ARCHITECTURE.fullmatch(name) is not None


def _cuda_device(name: str, target: str) -> Device:
    flops, bandwidth = CUDA_RATES.get(target, CUDA_RATES["sm_80"])
    return Device(name, "cuda", target=target, flops=flops, bandwidth=bandwidth)


def _toml_fields(given: Mapping[str, Scalar]) -> list[str]:
    return [f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v!r}" for k, v in given.items()]


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


class _ClusterReader:
    """Checks a parsed cluster file and collects every problem before complaining."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []

    def read(self, data: Mapping[str, object]) -> Cluster:
        self.problems += [f"unknown table [{key}], expected [[device]] and [[link]]" for key in data if key not in ("device", "link")]
        devices = [self._device(i, table) for i, table in enumerate(self._tables(data, "device"))]
        links = [self._link(i, table) for i, table in enumerate(self._tables(data, "link"))]
        names = [d.name for d in devices]
        self.problems += [f"device {n!r} is listed twice" for n in sorted({n for n in names if names.count(n) > 1})]
        self.problems += [f"link {i}: no device {end!r}" for i, link in enumerate(links) for end in (link.a, link.b) if end not in names]
        if not devices:
            self.problems.append("there is no [[device]]")
        if self.problems:
            raise UsageError("the cluster has problems:" + "".join(f"\n  - {p}" for p in self.problems), where=self.path)
        return Cluster(tuple(devices), tuple(links))

    def _tables(self, data: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
        found = data.get(key, [])
        if isinstance(found, list) and all(isinstance(t, dict) for t in found):
            return found
        self.problems.append(f"[{key}] must be a list of tables, written [[{key}]]")
        return []

    def _take(self, where: str, table: Mapping[str, object], spec: Mapping[str, tuple[type, Scalar]]) -> dict[str, Scalar]:
        values: dict[str, Scalar] = {key: default for key, (_, default) in spec.items()}
        for key, value in table.items():
            if key not in spec:
                self.problems.append(f"{where}: unknown key {key!r}, expected one of {', '.join(spec)}")
                continue
            kind = spec[key][0]
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                self.problems.append(f"{where}: {key} must be {kind.__name__}, got {value!r}")
            elif kind is not str and not value > 0 and key != "latency":  # type: ignore[operator]
                self.problems.append(f"{where}: {key} must be positive, got {value!r}")
            else:
                values[key] = value  # type: ignore[assignment]
        return values

    def _device(self, index: int, table: Mapping[str, object]) -> Device:
        where = f"device {table.get('name', index)!r}"
        memory = self._bytes(where, table.get("memory"))
        spec: dict[str, tuple[type, Scalar]] = {
            "name": (str, ""), "kind": (str, "cpu"), "host": (str, "localhost"), "target": (str, "native"), "threads": (int, 1), "flops": (float, 5e10), "bandwidth": (float, 1e10), "arch": (str, ""),
        }  # fmt: skip
        if table.get("kind") in ("cuda", "gpu"):
            table = {**table, "kind": "cuda"}
            target = table.get("arch", table.get("target"))
            if not isinstance(target, str) or not is_architecture(target):
                self.problems.append(f'{where}: a cuda device needs an architecture, e.g. arch = "sm_90"')
            flops, bandwidth = CUDA_RATES.get(str(target), CUDA_RATES["sm_80"])
            spec |= {"target": (str, ""), "flops": (float, flops), "bandwidth": (float, bandwidth)}
        elif "arch" in table:
            self.problems.append(f"{where}: arch is for cuda devices; a cpu has a target")
        values = self._take(where, {k: v for k, v in table.items() if k != "memory"}, spec)
        arch = values.pop("arch")
        if arch:
            values["target"] = arch
        if not values["name"] or any(c.isspace() for c in str(values["name"])):
            self.problems.append(f"{where}: needs a name without blanks")
        if values["kind"] not in KINDS:
            self.problems.append(f"{where}: kind must be one of {', '.join(KINDS)}, got {values['kind']!r}")
        space = KINDS.get(str(values["kind"]), "ram")
        return Device(**values, spaces=((space, memory),) if memory else ())  # type: ignore[arg-type]

    def _link(self, index: int, table: Mapping[str, object]) -> Link:
        spec: dict[str, tuple[type, Scalar]] = {
            "a": (str, ""), "b": (str, ""), "bandwidth": (float, SAME_HOST[0]), "latency": (float, SAME_HOST[1]), "nic": (str, ""),
        }  # fmt: skip
        return Link(**self._take(f"link {index}", table, spec))  # type: ignore[arg-type]

    def _bytes(self, where: str, value: object) -> int | None:
        if value is None or (type(value) is int and value > 0):
            return value
        number, _, unit = str(value).strip().partition(" ")
        try:
            return int(float(number) * _UNITS[unit.strip().upper() or "B"])
        except (ValueError, KeyError):
            self.problems.append(f"{where}: memory must be bytes or a size like '8 GiB', got {value!r}")
            return None
