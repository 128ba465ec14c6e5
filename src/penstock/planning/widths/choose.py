"""Layouts in which each layer has its own width: its samples lie over some of the axes of a mesh, and it computes them
on as many devices. `--shard widths` asks for that, `--shard widths:1.5` with an amplification limit.

In: the whole program as `shard` is about to see it, the mesh, and the devices of the stages. Out: layouts as texts, and
a note. Nothing else is new: a width is a layout of values, and `shard` puts the collectives between them.

Widths are products of the first axes of the mesh: those of `a=2,b=2,c=2` are 1, 2, 4 and 8. A layer on fewer devices
than there are is computed on the others as well, so that its results are there at once; only its gradients are added up
over fewer. Layers begin at operations that are neither elementwise nor views.

Costs are those of the program that `shard` makes with all layers of one width, for each width: its operations and
collectives, by the layer that they belong to. Where widths change, what crosses is gathered once, on the way out or
back. Known limits: one layout for all of a layer; what an operation takes at a change may be computed wide and gathered
behind, where `shard` finds that cheaper; with several stages the same costs count for all of them, those of the team
with the slowest device. Kernels that hide collectives count at the end alone: the program of the best widths is
compared with those of one width for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from itertools import pairwise
from math import inf, prod

import numpy as np

from penstock.ir.action_kinds import BACKWARD, FORWARD
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import REPLICAS, Module, Op, Value
from penstock.ir.ops import OPS
from penstock.ir.schedule_names import INFERENCE, SYNCHRONOUS
from penstock.ir.types import TensorType
from penstock.passes.costs.prices import GraphCost, shown_seconds
from penstock.passes.manager import Call, parse_pipeline, run_passes
from penstock.passes.partition.chain import chain_of, crossing_bytes, names_to_split_at, params_behind, readers
from penstock.passes.partition.devices import devices_of, mesh_axes
from penstock.passes.partition.partition import PartitionOptions
from penstock.passes.pipelines import PASSES
from penstock.passes.sharding.given import Layout, parse_mesh
from penstock.passes.sharding.propagate import Suggestions, rank_of, settled
from penstock.passes.sharding.shard import ShardOptions, graphs_in_order
from penstock.passes.sharding.written import WIDTHS, is_widths
from penstock.passes.simulator.exchanges import collective_seconds, collective_times
from penstock.passes.simulator.machine import machine_of
from penstock.support.errors import UsageError
from penstock.support.words import counted

from .search import WidthCosts, best_widths

Axes = tuple[tuple[str, int], ...]


def asks_for_widths(options: ShardOptions) -> bool:
    """Return whether layouts ask for widths of layers."""
    return any(map(is_widths, options.given))


def with_widths(
    module: Module, options: ShardOptions, cluster: Cluster, stages: Sequence[Sequence[str]]
) -> tuple[ShardOptions, str]:
    """Return the options of `shard` with the layouts of the fastest widths, and a note. `stages` names the devices of
    each stage."""
    limit = _limit(options.given)
    axes = _axes(options.mesh)
    model = _Layers.of(module, axes)
    devices, layers = _team_of(cluster, options.mesh, stages), len(model.starts)

    def team(choice: Sequence[int]) -> _Team:
        return _Team(module, axes, model.layouts(choice), cluster, devices)

    each = [team([k] * layers) for k in range(len(model.widths))]
    costs = model.costs(each)
    choice = best_widths(costs, limit)
    # By whole programs, in which kernels hide collectives, one width for all may be faster.
    totals = {tuple(choice): team(choice).total()}
    totals |= {(k,) * layers: each[k].total() for k in np.flatnonzero(costs.allowed(limit).all(axis=0)).tolist()}
    best = min(totals, key=lambda choice: totals[choice])
    return replace(options, given=model.layouts(best)), model.note(best, totals[best], [each[0], each[-1]], limit)


def _team_of(cluster: Cluster, mesh: str, stages: Sequence[Sequence[str]]) -> list[str]:
    """Return the devices of a team with the slowest device of all."""
    named = devices_of(cluster, [" ".join(names) for names in stages], 0, (), mesh_axes(mesh))
    teams = [
        [group[at] for at in team] for stage, group in enumerate(named.groups) for team in named.mesh("", stage).teams()
    ]
    slowest = min(teams, key=lambda team: min(device.flops for device in team))
    return [device.name for device in slowest]


def _limit(given: Sequence[str]) -> float:
    """Return the amplification limit that the one given text says."""
    if len(given) > 1:
        others = [text for text in given if not is_widths(text)]
        raise UsageError(
            f"{WIDTHS} lays out all values, and {'other layouts' if others else 'several limits'} are given",
            hint=f"leave out {', '.join(others or given[1:])}",
        )
    _, colon, number = given[0].partition(":")
    try:
        limit = float(number) if colon else inf
    except ValueError:
        limit = 0.0
    if not limit >= 1:
        raise UsageError(
            f"{given[0]!r} has no amplification limit of 1 or more",
            hint=f"write {WIDTHS}:1.5 for layers that use at most 1.5 times the device seconds of one device",
        )
    return limit


def _axes(mesh: str) -> Axes:
    if ";" in mesh:
        raise UsageError(f"{WIDTHS} takes one mesh for all stages, not {mesh!r}")
    axes = tuple((axis, size) for axis, size in parse_mesh(mesh).items() if axis != REPLICAS and size > 1)
    if not axes:
        what = f"{WIDTHS} needs an axis beside {REPLICAS} over more than one device"
        raise UsageError(what, hint="such as --mesh a=2,b=2: widths 1, 2 and 4")
    return axes


@dataclass(frozen=True, eq=False)
class _Layers:
    """A model in layers: its chain, the first operation of each layer, and the layout of all values where samples lie
    over every axis."""

    module: Module
    axes: Axes
    chain: list[Op]
    starts: list[int]
    layouts_of_values: Mapping[str, Layout]

    @classmethod
    def of(cls, module: Module, axes: Axes) -> _Layers:
        inputs = {value: _along_samples(module, value, axes) for value in module.data_inputs if value.type.rank}
        graphs = graphs_in_order(module)
        layouts = {f"%{value.name}": layout for value, layout in inputs.items()}
        suggested = Suggestions(module, graphs, layouts, dict(axes))
        suggested.spread()
        values = {v.name: v for graph in graphs for v in (*graph.ins, *(x for op in graph.ops for x in op.outs))}
        laid: dict[str, Layout] = {name: settled(suggested.of(value)) for name, value in values.items()}
        chain = chain_of(module)
        starts = [0, *(i for i in range(1, len(chain)) if rank_of(chain[i]))]
        return cls(module, axes, chain, starts, laid)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(prod(size for _, size in self.axes[:k]) for k in range(len(self.axes) + 1))

    def costs(self, teams: Sequence[_Team]) -> WidthCosts:
        """Return the seconds of all layers at all widths, of which each has a program."""
        cuts = crossing_bytes(self.chain, "f32")[self.starts[1:]]
        count = len(self.widths)
        seconds, moves = np.zeros((len(self.starts), count)), np.zeros((len(cuts), count, count))
        for k in range(count):
            for op, spent in teams[k].spent():
                seconds[self._layer(op), k] += spent
            for n in range(k):
                over = tuple(axis for axis, _ in self.axes[n:k])
                gathered = [teams[k].gathering(cut / self.widths[k], over) if cut else 0.0 for cut in cuts.tolist()]
                # On the way out where layers get narrower, and for gradients where they get wider.
                moves[:, k, n], moves[:, n, k] = gathered, gathered if "B" in self.module.graphs else 0.0
        return WidthCosts(self.widths, seconds, moves)

    def _layer(self, op: Op) -> int:
        """Return the layer of an operation of a local graph: that of the value whose gradient it makes, of its own
        result, of its variable, or of its place in the source; else the first."""
        names = [str(op.attrs.get("of", "")), *(v.name for v in op.outs), str(op.attrs.get("var", "")), f"at {op.loc}"]
        return next((self._numbers[name] for name in names if name in self._numbers), 0)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The layers of values, of gradients of parameters as variables, and of places in the source."""
        numbers: dict[str, int] = {}
        for layer, (first, last) in enumerate(pairwise([*self.starts, len(self.chain)])):
            for op in self.chain[first:last]:
                numbers |= {v.name: layer for v in op.outs}
                numbers.setdefault(f"at {op.loc}", layer)
        for name, positions in readers(self.chain, params_behind(self.module)).items():
            numbers[f"{name}.grad"] = numbers[self.chain[positions[0]].outs[0].name]
        return numbers

    def layouts(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the layouts of inputs and values as texts, where layers have the widths of these numbers."""
        width_of: dict[str, int] = {}
        layers = [sum(start <= i for start in self.starts) - 1 for i in range(len(self.chain))]
        inputs = {value.name for value in self.module.data_inputs}
        for op, layer in zip(self.chain, layers, strict=True):
            width_of |= {v.name: choice[layer] for v in op.outs}
            for value in op.ins:
                if value.name in inputs:
                    width_of.setdefault(value.name, choice[layer])
        return tuple(
            f"%{escape(name)}=[{','.join(dimensions)}]"
            for name, k in width_of.items()
            if any(dimensions := self._dimensions(name, k)) and self._is_split(name)
        )

    def _is_split(self, name: str) -> bool:
        return any(split.axes for split in settled(self.layouts_of_values[name]))

    def _dimensions(self, name: str, k: int) -> list[str]:
        kept = {axis for axis, _ in self.axes[:k]}
        words = []
        for split in settled(self.layouts_of_values[name]):
            axes = [axis for axis in split.axes if axis in kept]
            blocks = f"{split.blocks}*" if split.blocks != 1 else ""
            words.append(blocks + "".join(f"/{axis}" for axis in axes) if axes else "_")
        return words

    def note(self, choice: Sequence[int], seconds: float, ends: Sequence[_Team], limit: float) -> str:
        """Say which layers have which widths, and what that takes, beside the least and the most devices for all."""
        names, widths = names_to_split_at(self.chain), self.widths
        changes = [i + 1 for i, (a, b) in enumerate(pairwise(choice)) if a != b]
        layers = [f"{widths[choice[i]]} from {names[self.starts[i]]}" for i in changes]
        alone, most = (shown_seconds(team.total()) for team in ends)
        return (
            f"samples of layers lie over {', '.join([f'{widths[choice[0]]} at first', *layers])}: "
            f"{shown_seconds(seconds)} per microbatch forward and backward, with all layers on one device {alone}, on "
            f"{widths[-1]} {most}"
            + (f"; none uses more than {limit:g} times the device seconds of one device" if limit < inf else "")
            + ("; layers on fewer devices are computed on the others as well" if min(choice) < len(widths) - 1 else "")
        )


def _along_samples(module: Module, value: Value, axes: Axes) -> Layout:
    """Return the layout of an input whose samples lie over all axes."""
    dim = module.batch.get(value.name, 0)
    if dim is None:
        raise UsageError(f"{WIDTHS}: %{value.name} has no dimension that its samples are known to lie along")
    most = prod(size for _, size in axes)
    if value.type.dims[dim] < most:
        raise UsageError(f"{WIDTHS}: %{value.name} is {value.type}, too few samples for {counted(most, 'device')}")
    split = settled([None])[0]._replace(axes=tuple(axis for axis, _ in axes))
    return tuple(split if i == dim else None for i in range(value.type.rank))


class _Team:
    """A model in local form on the devices of one team, all layers with one width: what `shard` makes of it."""

    def __init__(
        self, module: Module, axes: Axes, given: tuple[str, ...], cluster: Cluster, devices: Sequence[str]
    ) -> None:
        mesh = ",".join(f"{axis}={size}" for axis, size in axes)
        kind = SYNCHRONOUS[0] if "B" in module.graphs else INFERENCE
        calls = [
            Call("shard", ShardOptions(mesh, given)),
            Call("partition", PartitionOptions(1, devices=(" ".join(devices),), mesh=mesh)),
            *parse_pipeline(f"split, schedule{{kind={kind},microbatches=1}}, weight-versions, localize", PASSES),
        ]
        self._local = run_passes(module.but(cluster=cluster), calls, PASSES)
        self._slowest = min(map(cluster.device, devices), key=lambda device: device.flops)
        self._route = machine_of(cluster, dict(enumerate(self._local.rank_devices()))).route

    def spent(self) -> Iterator[tuple[Op, float]]:
        """Yield the operations of the forward and the backward graph with their seconds."""
        for kind in (FORWARD, BACKWARD):
            graph = self._local.stage_graph(0, kind)
            if graph is None:
                continue
            for op, seconds in zip(graph.ops, GraphCost.of(graph).op_seconds(self._slowest), strict=True):
                is_exchange = OPS[op.kind].family == "collective"
                yield op, collective_seconds(self._local, 0, op, self._route) if is_exchange else seconds

    def total(self) -> float:
        """Return the seconds of a microbatch, forward and backward, with what kernels leave exposed of collectives."""
        seconds = 0.0
        for kind in (FORWARD, BACKWARD):
            graph = self._local.stage_graph(0, kind)
            if graph is not None:
                seconds += GraphCost.of(graph).seconds(self._slowest)
                times = collective_times(self._local, self._route, 0, kind, 0)
                seconds += sum(time.added for time in times.values())
        return seconds

    def gathering(self, nbytes: float, over: tuple[str, ...]) -> float:
        """Return the seconds in which devices that have so many bytes each get those of all others along axes."""
        part = Value("part", TensorType("f32", (max(1, round(nbytes / 4)),)))
        return collective_seconds(self._local, 0, Op("all_gather", (part,), (), {"axis": 0, "over": over}), self._route)
