"""Memory spaces beside the memory of devices, and the ways to them.

In: the tables [[space]] and [[way]] of a cluster file, or lines of a module. Out: a Space, where items are that devices
let go of, and a SpaceWay, the rate between a device and a space where it is not the usual one.

A CPU computes in the memory of its host, so what is to be elsewhere goes to files. A GPU has memory of its own, so what
it lets go of lies in that of its host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.ir.attrs import Scalar

from .quantities import refuse_unknown

FILE, RAM = "file", "ram"
# By kind of space, the kind of devices that reach it, and bytes per second and seconds where the file has none. Those
# of memory of the host are no limit: ways to it have the rates of `host-to-device`.
SPACE_KINDS = {FILE: "cpu", RAM: "cuda"}
SPACE_WAYS = {FILE: (1e9, 1e-4), RAM: (0.0, 0.0)}
# What names of shared cards of ways begin with.
CARD = "card "


@dataclass(frozen=True, slots=True)
class Space:
    """A memory space beside the memory of devices. Without a `host` each host has one of this name. It holds `bytes`,
    any number if 0. What is of kind `file` lies in files of folder `path`, by default that for temporary files; `ram`
    is memory of the host. Devices of the host share its `bandwidth` in each direction, if it has one."""

    name: str
    host: str = ""
    kind: str = FILE
    bytes: int = 0
    path: str = ""
    bandwidth: float = SPACE_WAYS[FILE][0]
    latency: float = SPACE_WAYS[FILE][1]

    def fields(self) -> dict[str, Scalar]:
        always = ("kind", "bandwidth", "latency")
        named = {f.name: getattr(self, f.name) for f in fields(Space) if f.name != "name"}
        return {key: value for key, value in named.items() if key in always or value}

    @staticmethod
    def from_fields(name: str, given: Mapping[str, Scalar]) -> Space:
        """Return a space, with the usual rates of its kind where none are given."""
        refuse_unknown(given, Space)
        kind = given.get("kind", FILE)
        if kind not in SPACE_KINDS:
            raise ValueError(f"no kind of space {kind!r}, expected one of {', '.join(SPACE_KINDS)}")
        bandwidth, latency = SPACE_WAYS[str(kind)]
        return Space(name, **{"bandwidth": bandwidth, "latency": latency, **given})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SpaceWay:
    """The rate of copies between a device and a space, in each direction. Those of the same `nic`, such as a bus that
    GPUs share, go through it together."""

    device: str
    space: str
    bandwidth: float
    latency: float = 0.0
    nic: str = ""

    def fields(self) -> dict[str, Scalar]:
        return {"bandwidth": self.bandwidth, "latency": self.latency} | ({"nic": self.nic} if self.nic else {})

    @staticmethod
    def from_fields(device: str, space: str, given: Mapping[str, Scalar]) -> SpaceWay:
        refuse_unknown(given, SpaceWay)
        if "bandwidth" not in given:
            raise ValueError("a way needs a bandwidth")
        return SpaceWay(device, space, **given)  # type: ignore[arg-type]
