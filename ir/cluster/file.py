"""Cluster files: a Cluster from TOML or YAML, with every problem reported at once, and back.

A file is TOML, or YAML (`.yaml`, `.yml`) with the same tables as lists; every key but names, and the bandwidth of a
way, has a default:

    [[device]]                                [[link]]
    name = "cpu:0"                            a = "cpu:0"
    kind = "cpu"            # or cuda         b = "cpu:1"
    host = "localhost"                        bandwidth = "2 GB/s"
    target = "native"       # cuda: arch      latency = "50 us"
    threads = 1                               nic = ""          # links with the same NIC share its bandwidth
    gpu = 0                 # cuda: number or UUID
    memory = "8 GiB"        # the space that holds tensors
    flops = "50 GFLOP/s"    # float32, all threads
    bandwidth = "10 GB/s"   # memory
                                              [links]           # pairs without a link of their own
    [[host]]                                  same-host = { bandwidth = "7 GB/s", latency = "20 us" }
    name = "node1"                            other-host = { bandwidth = "1 GB/s", latency = "200 us" }
    address = "10.0.0.1"                      host-to-device = { bandwidth = "10 GB/s", latency = "50 us" }
    interface = "eth0"
    nic_bandwidth = "25 Gbit/s"               [host.device]     # what its devices have that do not say otherwise
    nic_latency = "10 us"                     threads = 8

    [[space]]                                 # memory beside that of devices
    name = "disk"                             bytes = "100 GiB"       # 0, the default: any number
    host = "node1"          # or of each      path = "/scratch"       # its folder; by default that of temporary files
    kind = "file"           # or ram          bandwidth = "1 GB/s"    # in each direction, of all devices of the host

    [[way]]                                   # between a device and a space, where it has another rate
    device = "cuda:0"                         bandwidth = "25 GB/s"   # in each direction
    space = "dram"                            latency = "20 us"
    nic = ""                                  # ways with the same NIC share its bandwidth

Numbers are in bytes, seconds, operations per second and bytes per second; with a unit they are strings. Rates are from
1 to 1e24, seconds up to a million, bytes up to 2^60, threads up to 65536. Further keys of a device: `spaces`, a table
of several memory spaces in place of `memory`, the first holding tensors; `cache` and `cache_bandwidth`; and what
`penstock doctor` measures: `overhead`, `call_overhead`, `message_overhead`, `shared_overhead` (seconds),
`socket_bandwidth`, `copy_bandwidth`, the table `efficiency`, the part of the time of its threads that a `quota` leaves
(1: all of it), granted anew after each `quota_period` (0: evenly), and `source = "measured"`. A device of kind cuda (or
gpu) says `arch = "sm_90"` instead of a target; its rates are by default those of the usual card of that architecture.
Without `flops` a CPU has 50 GFLOP/s for each thread. With several [[host]] tables every device names its host.

What is written says everything, so that reading it back gives the same cluster.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from penstock.ir.attrs import Scalar
from penstock.support.errors import UsageError
from penstock.support.words import itemised

from .cluster import (
    CLASSES,
    EFFICIENCY_PREFIX,
    KINDS,
    THREAD_FLOPS,
    Cluster,
    Device,
    Host,
    Link,
    LinkClass,
    is_architecture,
    quota_problem,
)
from .gpus import usual_settings
from .quantities import check_range, parse_quantity
from .spaces import FILE, SPACE_KINDS, SPACE_WAYS, Space, SpaceWay
from .tables import is_yaml, read_tables

_NAME = re.compile(r"[\w./:\-]+")
_PATH = re.compile(r"[\w./:\-+@=,~]*")
# The type of each key: a word, a whole number, a share, or a quantity. Types that end in ? allow zero.
# Numbers as CUDA counts the devices that a process sees, and UUIDs, which may be cut short.
_GPU = re.compile(r"[0-9]{1,3}|(GPU|MIG)-[0-9a-zA-Z/-]+")
_DEVICE = {
    "name": "name",
    "kind": "word",
    "host": "name",
    "target": "name",
    "arch": "name",
    "threads": "count",
    "memory": "bytes",
    "spaces": "table",
    "flops": "operations per second",
    "bandwidth": "bytes per second",
    "cache": "bytes?",
    "cache_bandwidth": "bytes per second?",
    "overhead": "seconds?",
    "call_overhead": "seconds?",
    "message_overhead": "seconds?",
    "socket_bandwidth": "bytes per second",
    "shared_overhead": "seconds?",
    "copy_bandwidth": "bytes per second",
    "efficiency": "table",
    "gpu": "gpu",
    "source": "word",
    "quota": "share",
    "quota_period": "seconds?",
}
_LINK = {"a": "name", "b": "name", "bandwidth": "bytes per second", "latency": "seconds?", "nic": "name?"}
_CLASS = {"bandwidth": "bytes per second", "latency": "seconds?"}
_SPACE = {
    "name": "word",
    "host": "name?",
    "kind": "word",
    "bytes": "bytes?",
    "path": "path?",
    "bandwidth": "bytes per second?",
    "latency": "seconds?",
}
_WAY = {
    "device": "name",
    "space": "name",
    "bandwidth": "bytes per second",
    "latency": "seconds?",
    "nic": "name?",
}
_HOST = {
    "name": "name",
    "address": "name?",
    "interface": "name?",
    "nic_bandwidth": "bytes per second?",
    "nic_latency": "seconds?",
    "device": "table",
}


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file; one UsageError lists everything that is wrong with it."""
    return _ClusterReader(str(path)).read(read_tables(path))


def cluster_text(cluster: Cluster, path: str | os.PathLike[str]) -> str:
    """Return the text of a cluster file: TOML or YAML by the name of the file."""
    return cluster_yaml(cluster) if is_yaml(path) else cluster_toml(cluster)


class _ClusterReader:
    """A reader of a parsed cluster file, which collects every problem before it complains."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []

    def read(self, data: object) -> Cluster:
        if not isinstance(data, dict):
            raise UsageError(
                "the cluster must be tables [[device]], [[link]], [[host]], [[space]], [[way]] and [links], "
                f"got {data!r:.60}",
                where=self.path,
            )
        known = ("device", "link", "host", "links", "space", "way")
        self.problems += [f"unknown table [{key}], expected {', '.join(known)}" for key in data if key not in known]
        hosts: dict[str, Mapping[str, object]] = {}
        found_hosts = [self._host(i, table, hosts) for i, table in enumerate(self._tables(data, "host"))]
        devices = [self._device(i, table, hosts) for i, table in enumerate(self._tables(data, "device"))]
        links = [self._link(i, table) for i, table in enumerate(self._tables(data, "link"))]
        classes = list(self._classes(data.get("links", {})))
        spaces = [self._space(i, table) for i, table in enumerate(self._tables(data, "space"))]
        ways = [self._way(i, table) for i, table in enumerate(self._tables(data, "way"))]
        self._check_names(found_hosts, devices, links)
        self._check_spaces(spaces, found_hosts)
        self._check_ways(ways, devices, spaces)
        if self.problems:
            raise UsageError("the cluster has problems:" + itemised(self.problems), where=self.path)
        return Cluster(
            tuple(devices), tuple(links), tuple(found_hosts), tuple(classes), spaces=tuple(spaces), ways=tuple(ways)
        )

    def _check_names(self, hosts: list[Host], devices: list[Device], links: list[Link]) -> None:
        names = {d.name for d in devices}
        for what, listed in (("device", [d.name for d in devices]), ("host", [h.name for h in hosts])):
            self.problems += [
                f"{what} {n!r} is listed twice" for n in sorted({n for n in listed if n and listed.count(n) > 1})
            ]
        known = {h.name for h in hosts}
        for device in devices:
            if known and device.host not in known:
                self.problems.append(
                    f"device {device.name!r}: no host {device.host!r}, there are {', '.join(sorted(known))}"
                )
        self._check_gpus(devices)
        pairs: set[frozenset[str]] = set()
        for i, link in enumerate(links):
            pair = frozenset((link.a, link.b))
            missing = [end for end in (link.a, link.b) if end and end not in names]
            self.problems += [f"link {i}: no device {end!r}" for end in dict.fromkeys(missing)]
            if link.a and link.a == link.b:
                self.problems.append(f"link {i}: {link.a!r} is linked to itself")
            elif link.a and link.b and pair in pairs:
                self.problems.append(f"link {i}: {link.a!r} and {link.b!r} are linked twice")
            pairs.add(pair)
        if not devices:
            self.problems.append("there is no [[device]]")

    def _check_spaces(self, spaces: list[Space], hosts: list[Host]) -> None:
        """Report spaces of unknown kinds and hosts, and two of one name on a host."""
        known, seen = {h.name for h in hosts}, set[tuple[str, str]]()
        for space in spaces:
            where = f"space {space.name!r}"
            if space.kind not in SPACE_KINDS:
                self.problems.append(f"{where}: kind must be one of {', '.join(SPACE_KINDS)}, got {space.kind!r}")
            elif space.kind == FILE and not space.bandwidth:
                self.problems.append(f"{where}: bandwidth must be positive")
            elif space.kind != FILE and space.path:
                self.problems.append(f"{where}: a path is for files, and this is memory of the host")
            if known and space.host and space.host not in known:
                self.problems.append(f"{where}: no host {space.host!r}, there are {', '.join(sorted(known))}")
            if (space.name, space.host) in seen:
                self.problems.append(f"{where} is listed twice")
            seen.add((space.name, space.host))

    def _check_ways(self, ways: Sequence[SpaceWay], devices: Sequence[Device], spaces: Sequence[Space]) -> None:
        """Report ways between what is not there, or has no way."""
        hosts, seen = {device.name: device for device in devices}, set[tuple[str, str]]()
        for i, way in enumerate(ways):
            where, device = f"way {i}", hosts.get(way.device)
            reached = [s for s in spaces if s.name == way.space and device and s.host in ("", device.host)]
            if device is None and way.device:
                self.problems.append(f"{where}: no device {way.device!r}")
            elif device is not None and way.space and not reached:
                self.problems.append(f"{where}: no space {way.space!r} on the host of {way.device!r}")
            elif (
                device is not None
                and reached
                and all(SPACE_KINDS.get(s.kind, device.kind) != device.kind for s in reached)
            ):
                self.problems.append(f"{where}: {way.device!r} has no use for a space of kind {reached[0].kind!r}")
            if way.device and way.space and (way.device, way.space) in seen:
                self.problems.append(f"{where}: {way.device!r} and {way.space!r} have two ways")
            seen.add((way.device, way.space))

    def _check_gpus(self, devices: Sequence[Device]) -> None:
        """Report devices that are one GPU without saying so, and processors that name one."""
        for device in devices:
            if device.kind == "cpu" and device.gpu:
                self.problems.append(f"device {device.name!r}: gpu is for cuda devices")
            if problem := quota_problem(device.kind, device.quota, device.quota_period):
                self.problems.append(f"device {device.name!r}: {problem}")
        homes: dict[tuple[str, str], list[Device]] = {}
        for device in devices:
            if device.kind == "cuda":
                homes.setdefault((device.host, device.gpu_on_host), []).append(device)
        for (host, gpu), together in homes.items():
            if len(together) > 1 and not all(device.gpu for device in together):
                names = ", ".join(device.name for device in together)
                self.problems.append(f"{names} are all GPU {gpu} of {host} by their names: each needs gpu = ...")

    def _tables(self, data: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
        tables = data.get(key, [])
        if isinstance(tables, list) and all(isinstance(t, dict) for t in tables):
            return tables
        self.problems.append(f"[{key}] must be a list of tables, written [[{key}]]")
        return []

    # ------------------------------------------------------------------------------ tables

    def _host(self, index: int, table: Mapping[str, object], hosts: dict[str, Mapping[str, object]]) -> Host:
        where = f"host {table.get('name', index)!r}"
        values = self._take(where, table, _HOST)
        defaults = table.get("device", {})
        self._need_name(where, values)
        if isinstance(defaults, dict):
            hosts[str(values.get("name", ""))] = defaults
            spec = {k: v for k, v in _DEVICE.items() if k not in ("name", "host")}
            self._take(f"{where}, device", defaults, spec)
        values.pop("device", None)
        return Host(**{"name": "", **values})

    def _device(self, index: int, table: Mapping[str, object], hosts: Mapping[str, Mapping[str, object]]) -> Device:
        where = f"device {table.get('name', index)!r}"
        only = next(iter(hosts)) if len(hosts) == 1 else None
        host = table.get("host", only)
        if host is None and hosts:
            self.problems.append(f"{where}: needs a host, as there are several: {', '.join(sorted(hosts))}")
            host = next(iter(hosts))
        defaults = hosts.get(str(host), {})
        settings = {**({} if host is None else {"host": host}), **table}
        # A device with one spelling of a setting overrides the default of the other spelling.
        for same in (("memory", "spaces"), ("arch", "target")):
            if any(key in table for key in same):
                defaults = {k: v for k, v in defaults.items() if k not in same}
        problems = len(self.problems)
        values = self._take(where, settings, _DEVICE)
        inherited = {k: v for k, v in defaults.items() if k not in settings}
        quiet = _ClusterReader(self.path)  # errors in defaults were reported for the host
        values |= quiet._take(where, inherited, {k: v for k, v in _DEVICE.items() if k not in ("name", "host")})
        self._need_name(where, values)
        kind = str(values.setdefault("kind", "cpu"))
        kind = values["kind"] = "cuda" if kind == "gpu" else kind
        if kind not in KINDS:
            self.problems.append(f"{where}: kind must be one of {', '.join(KINDS)} or gpu, got {kind!r}")
        self._settle_target(where, kind, values, {**defaults, **table})
        # What a host says of the quotas of its devices is for those that have one.
        for key in ("quota", "quota_period"):
            if key not in table and (kind == "cuda" or values.get("quota", 1) == 1):
                values.pop(key, None)
        spaces = self._spaces(where, kind, values)
        efficiency = values.pop("efficiency", {})
        shares = tuple(self._shares(where, efficiency)) if isinstance(efficiency, dict) else ()
        if len(self.problems) > problems:
            return Device(str(values.get("name", "")), host=str(values.get("host", "localhost")))
        threads = values.get("threads", 1)
        if kind == "cuda":
            values = usual_settings(str(values["target"])) | values
        values.setdefault("flops", THREAD_FLOPS * float(threads))
        return Device(**values, spaces=spaces, efficiency=shares)

    def _settle_target(self, where: str, kind: str, values: dict[str, Any], given: Mapping[str, object]) -> None:
        """Make `arch` of a GPU its target, and require a target of a processor."""
        arch = values.pop("arch", None)
        if kind == "cuda":
            target = given.get("arch", given.get("target"))
            if not isinstance(target, str) or not is_architecture(target):
                self.problems.append(f'{where}: a cuda device needs an architecture, e.g. arch = "sm_90"')
            elif arch is not None and "target" in given and given["target"] != arch:
                self.problems.append(f"{where}: arch is {arch!r}, but target is {given['target']!r}")
            values["target"] = target
        elif "arch" in given:
            self.problems.append(f"{where}: arch is for cuda devices; a cpu has a target")

    def _spaces(self, where: str, kind: str, values: dict[str, Any]) -> tuple[tuple[str, int], ...]:
        memory, spaces = values.pop("memory", None), values.pop("spaces", None)
        if memory is not None and spaces is not None:
            self.problems.append(f"{where}: says memory and spaces; memory is the first of the spaces")
        if not isinstance(spaces, dict):
            return ((KINDS.get(kind, "ram"), memory),) if memory is not None else ()
        named_spaces = []
        for name, size in spaces.items():
            if not re.fullmatch(r"\w+", str(name)):
                self.problems.append(f"{where}: a memory space needs a name of letters, digits and _, got {name!r}")
            number = self._value(f"{where}, spaces", str(name), size, "bytes")
            if number is not None:
                named_spaces.append((str(name), int(number)))
        return tuple(named_spaces)

    def _shares(self, where: str, table: Mapping[str, object]) -> Iterator[tuple[str, float]]:
        for key, share in table.items():
            if not re.fullmatch(r"[a-z]\w*(\.\w+)?", str(key)):
                self.problems.append(
                    f"{where}, efficiency: {key!r} is no family of work, "
                    "such as products, products.bf16 or elements.bytes"
                )
            number = self._value(f"{where}, efficiency", str(key), share, "share")
            if number is not None:
                yield str(key), float(number)

    def _space(self, index: int, table: Mapping[str, object]) -> Space:
        where = f"space {table.get('name', index)!r}"
        values = self._take(where, table, _SPACE)
        self._need_name(where, values)
        bandwidth, latency = SPACE_WAYS.get(values.get("kind", FILE), SPACE_WAYS[FILE])
        return Space(**{"name": "", "bandwidth": bandwidth, "latency": latency, **values})

    def _way(self, index: int, table: Mapping[str, object]) -> SpaceWay:
        where = f"way {index}"
        values = self._take(where, table, _WAY)
        missing = [key for key in ("device", "space", "bandwidth") if key not in table]
        self.problems += [f"{where}: {key} is missing" for key in missing]
        return SpaceWay(**{"device": "", "space": "", "bandwidth": 1.0, **values})

    def _link(self, index: int, table: Mapping[str, object]) -> Link:
        where = f"link {index}"
        values = self._take(where, table, _LINK)
        self.problems += [f"{where}: {end} is missing" for end in ("a", "b") if end not in table]
        return Link(**{"a": "", "b": "", **values})

    def _classes(self, table: object) -> Iterator[LinkClass]:
        if not isinstance(table, dict):
            self.problems.append("[links] must be a table of classes of links: " + ", ".join(CLASSES))
            return
        for kind, settings in table.items():
            if kind not in CLASSES:
                self.problems.append(f"[links]: unknown class {kind!r}, expected one of {', '.join(CLASSES)}")
            elif not isinstance(settings, dict):
                self.problems.append(f"[links]: {kind} must be a table with bandwidth and latency, got {settings!r}")
            else:
                bandwidth, latency = CLASSES[kind]
                yield LinkClass(
                    kind,
                    **{"bandwidth": bandwidth, "latency": latency, **self._take(f"[links] {kind}", settings, _CLASS)},
                )

    # ------------------------------------------------------------------------------ values

    def _need_name(self, where: str, values: Mapping[str, Any]) -> None:
        if "name" not in values:
            self.problems.append(f"{where}: needs a name without blanks")

    def _take(self, where: str, table: Mapping[str, object], spec: Mapping[str, str]) -> dict[str, Any]:
        """Return the valid keys of a table as plain values, and report problems with the other keys."""
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key not in spec:
                self.problems.append(f"{where}: unknown key {key!r}, expected one of {', '.join(spec)}")
                continue
            taken_value = self._value(where, key, value, spec[key])
            if taken_value is not None:
                values[key] = taken_value
        return values

    def _value(self, where: str, key: str, value: object, kind: str) -> Any:
        """Return the value in the type that it must have. Report a problem and return None if it has another."""
        plain = kind.rstrip("?")
        if plain == "path":
            if isinstance(value, str) and _PATH.fullmatch(value):
                return value
            self.problems.append(f"{where}: {key} must be the path of a folder without blanks, got {value!r}")
        elif plain in ("name", "word"):
            if isinstance(value, str) and (_NAME.fullmatch(value) or (value == "" and kind.endswith("?"))):
                return value
            self.problems.append(
                f"{where}: {key} must be a name without blanks, of letters, digits and . / : - _, got {value!r}"
            )
        elif plain == "gpu":
            if type(value) in (int, str) and _GPU.fullmatch(str(value)):
                return str(value)
            self.problems.append(f"{where}: gpu must be a number from 0 on or a UUID, GPU-..., got {value!r}")
        elif plain == "table":
            if isinstance(value, dict):
                return value
            self.problems.append(f"{where}: {key} must be a table, got {value!r}")
        else:
            try:
                if plain != "count":
                    return parse_quantity(value, kind)
                if type(value) is not int or value <= 0:
                    raise ValueError(f"must be positive, a whole number, got {value!r}")
                check_range(value, value, plain)
            except ValueError as error:
                self.problems.append(f"{where}: {key} {error}")
            else:
                return value
        return None


# ------------------------------------------------------------------------------------------------ writing


def _plain(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as tables."""
    data: dict[str, Any] = {}
    if cluster.classes:
        data["links"] = {c.kind: dict(c.fields()) for c in cluster.classes}
    if cluster.spaces:
        data["space"] = [{"name": space.name, **space.fields()} for space in cluster.spaces]
    if cluster.hosts:
        data["host"] = [{"name": host.name, **host.fields()} for host in cluster.hosts]
    data["device"] = [_plain_device(device) for device in cluster.devices]
    if cluster.links:
        data["link"] = [{"a": link.a, "b": link.b, **link.fields()} for link in cluster.links]
    if cluster.ways:
        data["way"] = [{"device": way.device, "space": way.space, **way.fields()} for way in cluster.ways]
    return data


def _plain_device(device: Device) -> dict[str, Any]:
    plain = {key: value for key, value in device.fields().items() if not key.startswith(EFFICIENCY_PREFIX)}
    if device.kind == "cuda":
        plain |= {"overhead": device.overhead, "call_overhead": device.call_overhead}
    table: dict[str, Any] = {"name": device.name, **plain}
    if len(device.spaces) == 1 and device.spaces[0][0] == KINDS[device.kind]:
        table["memory"] = device.spaces[0][1]
    elif device.spaces:
        table["spaces"] = dict(device.spaces)
    if device.efficiency:
        table["efficiency"] = dict(device.efficiency)
    return table


def cluster_toml(cluster: Cluster) -> str:
    """Return the cluster file that `read_cluster` reads back as this cluster."""
    data = _plain(cluster)
    lines: list[str] = []
    for kind, table in data.pop("links", {}).items():
        lines += [f"[links.{kind}]", *(f"{k} = {_toml(v)}" for k, v in table.items()), ""]
    for name, tables in data.items():
        for table in tables:
            lines += [f"[[{name}]]", *(f"{k} = {_toml(v)}" for k, v in table.items()), ""]
    return "\n".join(lines)


def _toml(value: Scalar | Mapping[str, Scalar]) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def cluster_yaml(cluster: Cluster) -> str:
    """Return the cluster file in YAML."""
    text: str = yaml.safe_dump(_plain(cluster), sort_keys=False, allow_unicode=True)
    return text
