"""The devices of every stage, the mesh that they make, and the teams of it.

In: the options of `partition`, and a cluster. Out: for each stage its devices, in the order of the mesh. For costs
there is a device for each team: the slowest of it, with the least memory of all. There is also the module as one device
of a stage has it.

A mesh is written `dp=2,tp=2`, the last axis fastest. Without one, the devices of a stage are replicas of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import REPLICAS, Graph, Mesh, Module, Op, Value
from penstock.passes.sharding.given import parse_mesh
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StageDevices:
    """The devices of the stages, and the axes of their meshes; without axes, all devices of a stage are replicas.
    `packs` are the stages of every rank, where ranks run several; `unlike` the axes of each stage, if they differ."""

    groups: tuple[tuple[Device, ...], ...]
    axes: Axes = ()
    packs: tuple[tuple[int, ...], ...] = ()
    unlike: tuple[Axes, ...] = ()

    def mesh(self, name: str, stage: int) -> Mesh:
        """Return the mesh of a stage."""
        group = self.groups[stage]
        axes = self.unlike[stage] if self.unlike else self.axes
        return Mesh(name, axes or ((REPLICAS, len(group)),), tuple(device.name for device in group))

    def parts(self, module: Module) -> list[Module]:
        """Return the module for each stage as one device of it has it, once for all whose meshes are alike."""
        of_stages = self.unlike or (self.axes,) * len(self.groups)
        known = {axes: on_one_device(module, axes) for axes in dict.fromkeys(of_stages)}
        return [known[axes] for axes in of_stages]

    def teams(self) -> list[tuple[Device, ...]]:
        """Return a device for each team of every stage."""
        return [
            tuple(_slowest([group[at] for at in team]) for team in self.mesh("", stage).teams())
            for stage, group in enumerate(self.groups)
        ]


def _slowest(team: Sequence[Device]) -> Device:
    """Return the device by whose speed and memory a team goes."""
    slowest = min(team, key=lambda device: device.flops)
    limits = [device.spaces for device in team if device.spaces]
    return replace(slowest, spaces=min(limits, key=lambda spaces: spaces[0][1], default=()))


def mesh_axes(text: str) -> Axes:
    """Return the axes of a mesh that is written `dp=2,tp=2`; none of an empty text."""
    return tuple(parse_mesh(text).items()) if text.strip() else ()


def unlike_devices(
    cluster: Cluster, names: Sequence[str], split_at: Sequence[str], mesh: str, each: int = 1, folded: bool = False
) -> StageDevices:
    """Return the devices of stages that have a mesh each, written `tp=2;tp=1`. Devices are named, and cuts may be. With
    `each` stages on a device, these meshes are those of packs, to which stages are dealt as in `placed_packs`."""
    meshes = [mesh_axes(text) for text in mesh.split(";")]
    groups = [listed.split() for listed in names]
    named = [name for group in groups for name in group]
    problems = [f"device {name!r} is named twice" for name in sorted({n for n in named if named.count(n) > 1})]
    if len(groups) != len(meshes):
        problems.append(f"devices are named for {counted(len(groups), 'stage')}, meshes for {len(meshes)}")
    if split_at and len(split_at) + 1 != len(meshes) * each:
        problems.append(
            f"{counted(len(split_at), 'split point')} {'is' if len(split_at) == 1 else 'are'} named, "
            f"{counted(len(meshes), 'mesh')} "
            f"{'' if each == 1 else f'of {each} stages each '}need {len(meshes) * each - 1}"
        )
    for stage, (group, axes) in enumerate(zip(groups, meshes, strict=False)):
        if len(group) != prod(size for _, size in axes):
            needed = prod(size for _, size in axes)
            problems.append(f"stage {stage} has {counted(len(group), 'device')}, its mesh needs {needed}")
    if problems:
        raise UsageError(
            "cannot use these meshes:" + itemised(problems),
            hint="without --split-at, stages end where they are balanced",
        )
    placed = tuple(tuple(map(cluster.device, group)) for group in groups)
    if each == 1:
        return StageDevices(placed, unlike=tuple(meshes))
    at, packs = _dealt(placed, each, folded)
    return StageDevices(tuple(placed[place] for place in at), (), packs, tuple(meshes[place] for place in at))


def devices_of(
    cluster: Cluster, names: Sequence[str], stages: int, split_at: Sequence[str], axes: Axes = ()
) -> StageDevices:
    """Return the devices of every stage: those that `names` has for it, with blanks between several, else as many as a
    mesh needs, in the order of the cluster."""
    each = prod(size for _, size in axes)
    if not names:
        count, known = _stage_count(stages, split_at, len(cluster.devices), each), cluster.devices
        return StageDevices(tuple(tuple(known[s * each : (s + 1) * each]) for s in range(count)), axes)
    groups = [listed.split() for listed in names]
    count, named = len(groups), [name for group in groups for name in group]
    problems = [f"device {name!r} is named twice" for name in sorted({n for n in named if named.count(n) > 1})]
    problems += [f"stage {stage} has no device" for stage, group in enumerate(groups) if not group]
    problems += [
        f"stage {stage} has {counted(len(group), 'device')}, its mesh "
        f"{' x '.join(str(n) for _, n in axes)} needs {each}"
        for stage, group in enumerate(groups)
        if axes and group and len(group) != each
    ]
    if stages not in (0, count) or (split_at and len(split_at) + 1 != count):
        wanted = stages if stages not in (0, count) else len(split_at) + 1
        problems.append(f"devices are named for {counted(count, 'stage')}, {wanted} are asked for")
    if problems:
        raise UsageError("cannot use these devices:" + itemised(problems))
    return StageDevices(tuple(tuple(map(cluster.device, group)) for group in groups), axes)


def _stage_count(stages: int, split_at: Sequence[str], devices: int, each: int) -> int:
    count = len(split_at) + 1 if split_at else stages or devices // each
    if split_at and stages not in (0, count):
        raise UsageError(
            f"{counted(len(split_at), 'split point')} make {counted(count, 'stage')}, but {stages} are asked for"
        )
    if not 1 <= count <= devices // each:
        needed = max(count, 1)
        raise UsageError(
            f"{counted(needed, 'stage')} need {needed * each} devices, the cluster has {devices}"
            if each > 1
            else f"{count} stages need {count} devices, the cluster has {devices}",
            hint="add devices or ask for fewer stages",
        )
    return count


def placed_packs(
    cluster: Cluster,
    names: Sequence[str],
    devices: int,
    split_at: Sequence[str],
    axes: Axes,
    each: int,
    folded: bool,
) -> StageDevices:
    """Return the devices of every stage, `each` stages on a device, or on the devices of a mesh. They are dealt to
    these round (0 2 / 1 3), or `folded` (0 3 / 1 2)."""
    if each == 1:
        return devices_of(cluster, names, devices, split_at, axes)
    if each < 1:
        raise UsageError(f"a device has at least one stage, got {each}")
    cut = len(split_at) + 1
    if split_at and cut % each:
        raise UsageError(f"{counted(cut, 'stage')} cannot be dealt out by {each} to a device")
    placed = devices_of(cluster, names, devices or (cut // each if split_at else 0), (), axes)
    count = len(placed.groups)
    if len({len(group) for group in placed.groups}) > 1:
        raise UsageError("packs of stages need as many devices each", hint="give every stage as many replicas")
    if split_at and cut != count * each:
        raise UsageError(f"{counted(len(split_at), 'split point')} make {cut} stages, {count * each} are asked for")
    at, ranks = _dealt(placed.groups, each, folded)
    return StageDevices(tuple(placed.groups[place] for place in at), axes, ranks)


def _dealt(
    groups: Sequence[Sequence[Device]], each: int, folded: bool
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return the group of devices of every stage, and the stages of every rank."""
    count = len(groups)
    at = [place for row in range(each) for place in range(count)[:: -1 if folded and row % 2 else 1]]
    packs = [tuple(stage for stage, there in enumerate(at) if there == place) for place in range(count)]
    return at, tuple(pack for pack, group in zip(packs, groups, strict=True) for _ in group)


def on_one_device(module: Module, axes: Axes) -> Module:
    """Return the module with the types of what one device has of its tensors, for costs alone: attributes stay those of
    the whole. The same module where nothing is split."""
    sizes = dict(axes)

    def part(value: Value) -> Value:
        return value if value.type.is_plain else Value(value.name, value.type.local(sizes))

    def parts(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(map(part, values))

    def op_of(op: Op) -> Op:
        return Op(op.kind, parts(op.ins), parts(op.outs), op.attrs, op.loc)

    def graph_of(graph: Graph) -> Graph:
        ops = tuple(map(op_of, graph.ops))
        return Graph(graph.name, parts(graph.ins), parts(graph.outs), ops, parts(graph.saved))

    values = (v for g in module.graphs.values() for op in g.ops for v in (*op.ins, *op.outs))
    if all(var.type.is_plain for var in module.vars.values()) and all(value.type.is_plain for value in values):
        return module
    return module.but(
        inputs=parts(module.inputs),
        vars={name: replace(var, type=var.type.local(sizes)) for name, var in module.vars.items()},
        graphs={name: graph_of(graph) for name, graph in module.graphs.items()},
    )
