"""Links between devices, the hosts whose network cards they go through, and what carries messages over them.

In: fields of a file or of a module's text. Out: a `Link`, `Host` or `LinkClass`, with the usual figures for what is not
said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from penstock.ir.attrs import Scalar

from .device import Device
from .quantities import refuse_unknown

# What carries the messages of two devices. On one host: memory that ranks share, the same with copies by a GPU at one
# end, and GPUs that write to each other's memory. Between hosts: NCCL for two GPUs, gloo for all others.
MEMORY, PINNED, IPC, NCCL, GLOO = "memory", "pinned", "ipc", "nccl", "gloo"
SAME_HOST, OTHER_HOST, HOST_TO_DEVICE = "same-host", "other-host", "host-to-device"
# Bytes per second and seconds of pairs of devices without a link or a class of links in the cluster: shared memory, a
# fast network, PCIe.
CLASSES = {SAME_HOST: (7e9, 2e-5), OTHER_HOST: (1e9, 2e-4), HOST_TO_DEVICE: (1e10, 5e-5)}


@dataclass(frozen=True, slots=True)
class Link:
    """A two-way connection; links with the same `nic` share its bandwidth."""

    a: str
    b: str
    bandwidth: float = CLASSES[SAME_HOST][0]
    latency: float = CLASSES[SAME_HOST][1]
    nic: str = ""

    def fields(self) -> dict[str, Scalar]:
        return {"bandwidth": self.bandwidth, "latency": self.latency} | ({"nic": self.nic} if self.nic else {})

    @staticmethod
    def from_fields(a: str, b: str, given: Mapping[str, Scalar]) -> Link:
        refuse_unknown(given, Link)
        return Link(a, b, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Host:
    """A machine. `address` and `interface` say how other hosts reach it. Links to other hosts that no entry describes
    go through its network card: `nic_bandwidth` (0: as fast as the links) is shared by all of them, in each direction;
    `nic_latency` comes on top of that of the link."""

    name: str
    address: str = ""
    interface: str = ""
    nic_bandwidth: float = 0.0
    nic_latency: float = 0.0

    def fields(self) -> dict[str, Scalar]:
        return {
            f.name: getattr(self, f.name)
            for f in fields(Host)
            if f.name != "name" and getattr(self, f.name) != f.default
        }

    @staticmethod
    def from_fields(name: str, given: Mapping[str, Scalar]) -> Host:
        refuse_unknown(given, Host)
        return Host(name, **given)  # type: ignore[arg-type]


def class_between(a: Device, b: Device) -> str:
    """Return the class of links that two devices without a link of their own belong to."""
    if a.host != b.host:
        return OTHER_HOST
    return HOST_TO_DEVICE if "cuda" in (a.kind, b.kind) else SAME_HOST


@dataclass(frozen=True, slots=True)
class LinkClass:
    """The rates of pairs of devices of one kind that have no link of their own: `same-host`, `other-host` or
    `host-to-device`."""

    kind: str
    bandwidth: float
    latency: float

    def fields(self) -> dict[str, Scalar]:
        return {"bandwidth": self.bandwidth, "latency": self.latency}

    @staticmethod
    def from_fields(kind: str, given: Mapping[str, Scalar]) -> LinkClass:
        refuse_unknown(given, LinkClass)
        if kind not in CLASSES:
            raise ValueError(f"no class of links {kind!r}, expected one of {', '.join(CLASSES)}")
        return LinkClass(kind, **given)  # type: ignore[arg-type]


class Path(NamedTuple):
    """The way of a transfer through links and cards. `shares` are (name, bytes per second) of what it has in common
    with other transfers: network cards, those of hosts by direction, as they send and receive at once. Sums of
    gradients go through sockets, also where messages go through memory: at `summing` bytes per second at most."""

    bandwidth: float
    latency: float
    shares: tuple[tuple[str, float], ...] = ()
    summing: float = math.inf
