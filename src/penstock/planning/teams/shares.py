"""The work of one device of a team: its part of a model's operations, and the seconds of what the team exchanges.

In: the whole model as `shard` sees it, a team, and layouts. Out: the model with the types of what one device has, and
for each operation of its graphs the seconds of collectives in its place; layouts by their seconds.

Known limits: no kernel hides a collective here, and forms of operations that add up by themselves, such as a softmax
along a split row, exchange nothing. The simulation of a plan counts both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf

from penstock.ir.action_kinds import UPDATE
from penstock.ir.graph import Graph, Mesh, Module, Op, Value
from penstock.ir.types import TensorType
from penstock.passes.costs.prices import GraphCost
from penstock.passes.partition.devices import on_one_device
from penstock.passes.sharding.presets import PRESETS
from penstock.passes.sharding.shard import ShardOptions, shard
from penstock.passes.sharding.written import PRESET
from penstock.passes.simulator.exchanges import team_seconds
from penstock.passes.simulator.machine import machine_of
from penstock.planning.layouts.choose import CHOSEN, IN_BLOCKS
from penstock.planning.layouts.costs import LayoutModel, LayoutPrices
from penstock.planning.layouts.search import best_options
from penstock.planning.watching import ProgressHook
from penstock.support.errors import UsageError, VerifyError

from .teams import Teams

# The part of the memory of a device that the integer programme counts on: passes count more than it does.
_PART = 0.85
# The most layouts of the integer programme: with and without a limit, each in repeated blocks alone, too.
_SOLVED = 4
# The seconds of collectives in the place of each operation, by graph.
Exchanged = Mapping[str, Sequence[float]]


def share_of(module: Module, teams: Teams) -> tuple[Module, Exchanged]:
    """Return what one device of a team has of a whole model, and the seconds of what the team exchanges."""
    laid, prices = shard(module, ShardOptions(teams.mesh(), teams.layouts)), _prices(teams)
    exchanged = {
        name: [
            prices.move(op.ins[0].type, op.outs[0].type, teams.axes) if op.kind == "reshard" else 0.0
            for op in graph.ops
        ]
        for name, graph in laid.graphs.items()
    }
    return on_one_device(laid, tuple(teams.axes.items())), exchanged


def rank_layouts(module: Module, teams: Teams, microbatches: int, progress: ProgressHook | None = None) -> list[Teams]:
    """Return the teams with the layouts of each preset that a model has, and with those of the integer programme, the
    fastest first."""
    device = teams.cluster.devices[0]
    ranked = list[tuple[float, int, Teams]]()
    for name, texts in _candidates(module, teams, microbatches):
        if progress is not None:
            progress(len(ranked), len(PRESETS) + _SOLVED, f"layouts: {name}")
        each = replace(teams, layouts=texts, named=name)
        try:
            share, exchanged = share_of(module, each)
        except (UsageError, VerifyError):
            # Not every model has every preset.
            continue
        added = {
            kind: sum(GraphCost(graph).op_seconds(device)) + sum(exchanged[kind])
            for kind, graph in share.graphs.items()
        }
        total = sum(seconds / (microbatches if kind == UPDATE else 1) for kind, seconds in added.items())
        ranked.append((total, len(ranked), each))
    return [each for _, _, each in sorted(ranked, key=lambda row: row[:2])]


def _candidates(module: Module, teams: Teams, microbatches: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield layouts with their names: of presets, and of the integer programme, without a limit of memory and where one
    team has to hold the model."""
    for preset in PRESETS:
        yield PRESET + preset, (PRESET + preset,)
    model = LayoutModel(module, teams.axes, _prices(teams, microbatches))
    costs, limits = model.costs(), [device.room for device in teams.cluster.devices if device.room]
    tried = set[tuple[str, ...]]()
    for name, room in ((CHOSEN, inf), (f"{CHOSEN} for less memory", _PART * min(limits, default=inf))):
        options = best_options(replace(costs, room=room)).options
        if options is None:
            continue
        for each, texts in ((name, model.texts(options)), (name + IN_BLOCKS, model.texts(options, open_outside=True))):
            if texts and texts not in tried:
                tried.add(texts)
                yield each, texts


def _prices(teams: Teams, microbatches: int = 1) -> LayoutPrices:
    """Return prices on the first device, and of collectives on the slowest team."""
    device = teams.cluster.devices[0]
    routes = [machine_of(teams.whole, dict(enumerate(names))).route for names in teams.members.values()]
    mesh = Mesh("team", tuple(teams.axes.items()), next(iter(teams.members.values())))

    @cache
    def collective(kind: str, t: TensorType, over: tuple[str, ...]) -> float:
        op = Op(kind, (Value("part", t),), (), {"over": over[0] if len(over) == 1 else over})
        return max(team_seconds(op, mesh, route) for route in routes)

    def operations(graph: Graph) -> Sequence[float]:
        return GraphCost.of(graph).op_seconds(device)

    return LayoutPrices(operations, collective, microbatches)
