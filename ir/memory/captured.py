"""The memory of calls that stages on a GPU capture as CUDA graphs: what one takes, and what a plan leaves for all.

In: a module with a schedule, a rank. Out: bytes by stage.

A captured call (backends/tvm/cuda/captures.py) keeps all it works in to the end of the run: temporaries, results, and
copies of the inputs that no graph of its stage makes, each in whole pages. So captured calls take memory beside the
peak of a plan (predict.py), which is that of calls kernel by kernel, and come before captures. They are optional:
`captured_room` gives them what the device has beside the peaks of all ranks on it, and the back end captures nothing
that does not fit. What a rank takes is then the peak and this room at most.

    calls of a graph    one for each microbatch in flight and one more, of each weight version; of an update and of what
                        comes with it, one for each version. Calls with other addresses stay as they are
    never               graphs with collectives, and those of variables that have a home in another memory space

Limit: what a vendor's library takes for itself during a capture is known behind that, and comes off the room then.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from penstock.ir.action_kinds import ACTION_KINDS, DROP, FORWARD
from penstock.ir.cluster.cluster import Device
from penstock.ir.cluster.gpus import CONTEXT, WORKSPACES
from penstock.ir.collective_calls import calls_of
from penstock.ir.graph import Graph, Module, signature, stage_vars
from penstock.ir.schedule import COMPUTE, Action

from .predict import BATCHES, measure_memory
from .walk import actions_of
from .workspace import planned_blocks

# The captured calls that a graph may have.
MOST_CALLS = 64
# TVM's allocator takes whole pages.
_PAGE = 4096


def never_captured(graph: Graph) -> str:
    """Return why calls of a graph are never captured; empty if they may be."""
    return "its collectives wait for other ranks" if next(iter(calls_of(graph)), None) is not None else ""


def made_values(graphs: Iterable[Graph]) -> set[str]:
    """Return the values that graphs of a stage make. A captured call reads them where they lie."""
    return {value.name for graph in graphs for value in signature(graph).results}


def captured_bytes(graph: Graph, made: Container[str]) -> int:
    """Return what a captured call of a graph keeps, where the graphs of its stage make some values."""
    values = [*(value for value in graph.ins if value.name not in made), *signature(graph).results]
    return sum(map(in_pages, (*planned_blocks(graph), *(value.type.nbytes for value in values))))


def in_pages(nbytes: int) -> int:
    """Return the bytes of the pages that a block lies in."""
    return -(-nbytes // _PAGE) * _PAGE


def captured_wish(module: Module, rank: int) -> dict[int, int]:
    """Return what the captured calls of each stage of a rank would keep, by the count above; nothing on a CPU."""
    if module.schedule is None or _gpu_of(module, rank) is None:
        return {}
    actions = actions_of(module.schedule, rank, BATCHES)
    return {stage: _wish(module, stage, actions) for stage in module.schedule.stages_of(rank)}


def captured_room(module: Module, rank: int, left: int | None = None) -> dict[int, int]:
    """Return what the captured calls of each stage of a rank may keep: what they would, as far as the memory of the
    rank's device has it beside the plans of all ranks there, and as far as so much is left."""
    wish = captured_wish(module, rank)
    place = _gpu_of(module, rank)
    if place is not None and place.memory:
        beside = ranks_beside(module, place)
        planned = sum(measure_memory(module)[other].peak + CONTEXT + WORKSPACES for other in beside)
        share = (place.memory - planned) // len(beside)
        left = share if left is None else min(left, share)
    room = {}
    for stage, wanted in wish.items():
        room[stage] = wanted if left is None else max(0, min(wanted, left))
        left = None if left is None else left - room[stage]
    return room


def _wish(module: Module, stage: int, actions: Iterable[Action]) -> int:
    graphs = {kind: graph for kind in COMPUTE if (graph := module.stage_graph(stage, kind)) is not None}
    inner = made_values(graphs.values())
    held = stage_vars(module, stage)
    versions = max((var.versions for var in held.values()), default=1)
    in_flight = _most_in_flight(action for action in actions if action.stage == stage)
    total = 0
    for kind, graph in graphs.items():
        is_away = any(held[slot.var].home for slot in signature(graph).slots if slot.var in held)
        if not never_captured(graph) and not is_away:
            calls = versions * (1 if ACTION_KINDS[kind].per == "batch" else in_flight + 1)
            total += min(calls, MOST_CALLS) * captured_bytes(graph, inner)
    return total


def _most_in_flight(actions: Iterable[Action]) -> int:
    """Return the most microbatches that a stage works on at once."""
    now = most = 0
    for action in actions:
        now += (action.kind == FORWARD) - (action.kind == DROP)
        most = max(most, now)
    return most


def _gpu_of(module: Module, rank: int) -> Device | None:
    """Return the device of a rank where it is a GPU."""
    name = module.rank_devices()[rank]
    devices = () if module.cluster is None else module.cluster.devices
    return next((d for d in devices if d.name == name and d.kind == "cuda"), None)


def ranks_beside(module: Module, place: Device) -> list[int]:
    """Return the ranks on one GPU."""
    devices = {rank: _gpu_of(module, rank) for rank in range(len(module.rank_packs()))}
    return [rank for rank, d in devices.items() if d and (d.host, d.gpu_on_host) == (place.host, place.gpu_on_host)]
