"""The devices of a cluster in teams, each of which stands for one device of the planner.

In: a cluster, the axes that tensors are split over, and layouts on them. Out: a cluster with a device for each team, as
fast as its devices, and the names and meshes that a plan over teams stands for.

A team are devices alike on one host, in the order of the cluster. Devices that make no whole team are left out.

Limits: all teams of a plan are equally large. The way between two teams is that between their first devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import REPLICAS
from penstock.passes.planner.plan import PipelinePlan
from penstock.support.errors import DoesNotFit

# The largest team that is tried where no mesh is given.
MOST_DEVICES = 8
# The axis of the meshes that are tried.
AXIS = "tp"


@dataclass(frozen=True)
class Teams:
    """Teams of devices: `axes` are those of a team, `layouts` how tensors lie on them, `named` what people call
    these."""

    whole: Cluster
    axes: Mapping[str, int]
    layouts: tuple[str, ...] = ()
    named: str = ""

    @property
    def size(self) -> int:
        """The number of devices of a team."""
        return prod(self.axes.values())

    @cached_property
    def members(self) -> dict[str, tuple[str, ...]]:
        """The devices of every team by its name."""
        teams = [group[i : i + self.size] for group in alike_on_hosts(self.whole) for i in _steps(group, self.size)]
        position = {device.name: i for i, device in enumerate(self.whole.devices)}
        return {"+".join(names): tuple(names) for names in sorted(teams, key=lambda names: position[names[0]])}

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster with a device for each team."""
        first = {names[0]: team for team, names in self.members.items()}
        devices = tuple(replace(self.whole.device(name), name=team) for name, team in first.items())
        links = tuple(
            replace(link, a=first[link.a], b=first[link.b])
            for link in self.whole.links
            if link.a in first and link.b in first
        )
        return replace(self.whole, devices=devices, links=links)

    @property
    def seated(self) -> Cluster:
        """The same, where each team takes the cores of all its devices, for simulations."""
        cluster = self.cluster
        return replace(
            cluster, devices=tuple(replace(device, threads=device.threads * self.size) for device in cluster.devices)
        )

    def mesh(self, replicas: int = 1) -> str:
        """Return the mesh of a stage with so many teams as replicas."""
        axes = {**({REPLICAS: replicas} if replicas > 1 else {}), **self.axes}
        return ",".join(f"{axis}={size}" for axis, size in axes.items())

    def mesh_of(self, plan: PipelinePlan) -> str:
        """Return the mesh of the stages of a plan over teams."""
        counts = {len(stage.devices) for stage in plan.stages}
        if len(counts) > 1:
            listed = " and ".join(map(str, sorted(counts)))
            raise DoesNotFit(f"stages on {listed} teams: all stages that split tensors have as many replicas")
        return self.mesh(counts.pop())


def _steps(group: list[str], size: int) -> range:
    return range(0, len(group) - size + 1, size)


def alike_on_hosts(cluster: Cluster) -> list[list[str]]:
    """Return the names of devices that are alike and on one host, by group."""
    groups: dict[Device, list[str]] = {}
    for device in cluster.devices:
        groups.setdefault(replace(device, name="", gpu=""), []).append(device.name)
    return [*groups.values()]


def sizes_of_teams(cluster: Cluster) -> list[int]:
    """Return the sizes of teams to try: divisors of the numbers of devices that are alike on a host."""
    counts = {len(group) for group in alike_on_hosts(cluster)}
    return [size for size in range(2, MOST_DEVICES + 1) if any(count % size == 0 for count in counts)]
