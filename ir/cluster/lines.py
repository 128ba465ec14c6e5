"""The lines of a cluster in the text form of a module, printed and parsed.

links = "links " class {" " key "=" literal}          space = "space " name {" " key "=" literal}
host  = "host " name {" " key "=" literal}            link  = "link " name " " name {" " key "=" literal}
device = "device " name {" " key "=" literal} {" " space ":" bytes}
way   = "way " device " " space {" " key "=" literal}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.ir.attrs import Scalar, parse_scalar, print_literal

from .cluster import Cluster, Device, Host, Link, LinkClass
from .spaces import Space, SpaceWay

_FIELD = re.compile(r"([\w./:\-]+)=(.*)")
_SPACE = re.compile(r"(\w+):(\d+)")


def _print_fields(fields: Mapping[str, Scalar]) -> str:
    return "".join(f" {k}={print_literal(v)}" for k, v in fields.items())


def cluster_lines(cluster: Cluster) -> Iterator[str]:
    """Yield the lines of a cluster, without indentation."""
    for kind in cluster.classes:
        yield f"links {kind.kind}{_print_fields(kind.fields())}"
    for host in cluster.hosts:
        yield f"host {host.name}{_print_fields(host.fields())}"
    for space in cluster.spaces:
        yield f"space {space.name}{_print_fields(space.fields())}"
    for device in cluster.devices:
        spaces = "".join(f" {name}:{size}" for name, size in device.spaces)
        yield f"device {device.name}{_print_fields(device.fields())}{spaces}"
    for link in cluster.links:
        yield f"link {link.a} {link.b}{_print_fields(link.fields())}"
    for way in cluster.ways:
        yield f"way {way.device} {way.space}{_print_fields(way.fields())}"


class ClusterLines:
    """The parser of these lines. `rules` read a line each, by its first word."""

    def __init__(self) -> None:
        self._devices: list[Device] = []
        self._links: list[Link] = []
        self._hosts: list[Host] = []
        self._classes: list[LinkClass] = []
        self._spaces: list[Space] = []
        self._ways: list[SpaceWay] = []
        self.rules: dict[str, Callable[[str], None]] = {
            "links": self._class,
            "host": self._host,
            "space": self._space,
            "device": self._device,
            "link": self._link,
            "way": self._way,
        }

    def cluster(self) -> Cluster | None:
        """Return the cluster of the lines so far; None without devices."""
        if not self._devices:
            return None
        return Cluster(
            tuple(self._devices),
            tuple(self._links),
            tuple(self._hosts),
            tuple(self._classes),
            spaces=tuple(self._spaces),
            ways=tuple(self._ways),
        )

    def _device(self, line: str) -> None:
        name, *words = line.split(" ")[1:]
        fields = {m[1]: parse_scalar(m[2]) for w in words if (m := _FIELD.fullmatch(w))}
        spaces = tuple((m[1], int(m[2])) for w in words if (m := _SPACE.fullmatch(w)))
        if len(fields) + len(spaces) != len(words):
            raise ValueError("expected 'device name key=value ... space:bytes ...'")
        self._devices.append(Device.from_fields(name, fields, spaces))

    def _link(self, line: str) -> None:
        a, b, *words = line.split(" ")[1:]
        self._links.append(Link.from_fields(a, b, _fields(words)))

    def _host(self, line: str) -> None:
        name, *words = line.split(" ")[1:]
        self._hosts.append(Host.from_fields(name, _fields(words)))

    def _space(self, line: str) -> None:
        name, *words = line.split(" ")[1:]
        self._spaces.append(Space.from_fields(name, _fields(words)))

    def _way(self, line: str) -> None:
        device, space, *words = line.split(" ")[1:]
        self._ways.append(SpaceWay.from_fields(device, space, _fields(words)))

    def _class(self, line: str) -> None:
        kind, *words = line.split(" ")[1:]
        self._classes.append(LinkClass.from_fields(kind, _fields(words)))


def _fields(words: Iterable[str]) -> dict[str, Scalar]:
    fields = {}
    for word in words:
        match = _FIELD.fullmatch(word)
        if match is None:
            raise ValueError("expected 'key=value'")
        fields[match[1]] = parse_scalar(match[2])
    return fields
