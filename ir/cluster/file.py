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
from collections.abc import Iterator, Mapping
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
)
from .file_checks import name_problems, space_problems, way_problems
from .file_values import CLASS, DEVICE, HOST, LINK, SPACE, WAY, ValueReader
from .gpus import usual_settings
from .spaces import FILE, SPACE_WAYS, Space, SpaceWay
from .tables import is_yaml, read_tables


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file; one UsageError lists everything that is wrong with it."""
    return _ClusterReader(str(path)).read(read_tables(path))


def cluster_text(cluster: Cluster, path: str | os.PathLike[str]) -> str:
    """Return the text of a cluster file: TOML or YAML by the name of the file."""
    return cluster_yaml(cluster) if is_yaml(path) else cluster_toml(cluster)


class _ClusterReader(ValueReader):
    """A reader of a parsed cluster file, which collects every problem before it complains."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

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
        listed_hosts = [self._host(i, table, hosts) for i, table in enumerate(self._tables(data, "host"))]
        devices = [self._device(i, table, hosts) for i, table in enumerate(self._tables(data, "device"))]
        links = [self._link(i, table) for i, table in enumerate(self._tables(data, "link"))]
        classes = list(self._classes(data.get("links", {})))
        spaces = [self._space(i, table) for i, table in enumerate(self._tables(data, "space"))]
        ways = [self._way(i, table) for i, table in enumerate(self._tables(data, "way"))]
        self.problems += [
            *name_problems(listed_hosts, devices, links),
            *space_problems(spaces, listed_hosts),
            *way_problems(ways, devices, spaces),
        ]
        if self.problems:
            raise UsageError("the cluster has problems:" + itemised(self.problems), where=self.path)
        return Cluster(
            tuple(devices), tuple(links), tuple(listed_hosts), tuple(classes), spaces=tuple(spaces), ways=tuple(ways)
        )

    def _tables(self, data: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
        tables = data.get(key, [])
        if isinstance(tables, list) and all(isinstance(t, dict) for t in tables):
            return tables
        self.problems.append(f"[{key}] must be a list of tables, written [[{key}]]")
        return []

    # ------------------------------------------------------------------------------ tables

    def _host(self, index: int, table: Mapping[str, object], hosts: dict[str, Mapping[str, object]]) -> Host:
        where = f"host {table.get('name', index)!r}"
        values = self.take(where, table, HOST)
        defaults = table.get("device", {})
        self.need_name(where, values)
        if isinstance(defaults, dict):
            hosts[str(values.get("name", ""))] = defaults
            spec = {k: v for k, v in DEVICE.items() if k not in ("name", "host")}
            self.take(f"{where}, device", defaults, spec)
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
        values = self.take(where, settings, DEVICE)
        inherited = {k: v for k, v in defaults.items() if k not in settings}
        quiet = _ClusterReader(self.path)  # errors in defaults were reported for the host
        values |= quiet.take(where, inherited, {k: v for k, v in DEVICE.items() if k not in ("name", "host")})
        self.need_name(where, values)
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
            number = self.value(f"{where}, spaces", str(name), size, "bytes")
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
            number = self.value(f"{where}, efficiency", str(key), share, "share")
            if number is not None:
                yield str(key), float(number)

    def _space(self, index: int, table: Mapping[str, object]) -> Space:
        where = f"space {table.get('name', index)!r}"
        values = self.take(where, table, SPACE)
        self.need_name(where, values)
        bandwidth, latency = SPACE_WAYS.get(values.get("kind", FILE), SPACE_WAYS[FILE])
        return Space(**{"name": "", "bandwidth": bandwidth, "latency": latency, **values})

    def _way(self, index: int, table: Mapping[str, object]) -> SpaceWay:
        where = f"way {index}"
        values = self.take(where, table, WAY)
        missing = [key for key in ("device", "space", "bandwidth") if key not in table]
        self.problems += [f"{where}: {key} is missing" for key in missing]
        return SpaceWay(**{"device": "", "space": "", "bandwidth": 1.0, **values})

    def _link(self, index: int, table: Mapping[str, object]) -> Link:
        where = f"link {index}"
        values = self.take(where, table, LINK)
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
                    **{"bandwidth": bandwidth, "latency": latency, **self.take(f"[links] {kind}", settings, CLASS)},
                )


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
