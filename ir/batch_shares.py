"""The parts of a batch: samples of a microbatch, microbatches of a rank, inputs of a stage, the stage of the loss.

In: a module with stages and a schedule. Out: plain facts about it, which nothing is decided by here.
"""

from __future__ import annotations

from math import gcd

from .action_kinds import BACKWARD, FORWARD
from .graph import Module
from .schedule import READERS


def fed_inputs(module: Module, stage: int) -> tuple[str, ...]:
    """Return the module inputs that a stage takes from the data, rather than from another stage."""
    received = {value.name for edge in module.edges if edge.dst == stage for value in edge.values}
    names = {value.name for value in module.data_inputs} - received
    graphs = [module.stage_graph(stage, kind) for kind in READERS]
    read = {value.name for graph in graphs if graph is not None for value in graph.ins}
    sent = {value.name for edge in module.edges if edge.src == stage and edge.phase == FORWARD for value in edge.values}
    return tuple(value.name for value in module.data_inputs if value.name in names & (read | sent))


def share_of(module: Module, rank: int) -> list[int]:
    """Return the microbatches of a batch that a rank runs."""
    assert module.schedule is not None
    m = module.schedule.microbatches
    return sorted({action.mb % m for action in module.schedule.ranks[rank].batch if action.kind == FORWARD})


def loss_stage(module: Module) -> int | None:
    """Return the stage whose forward graph computes the module's first output; None for a module without a backward
    graph."""
    if not any(module.stage_graph(stage.index, BACKWARD) for stage in module.stages):
        return None
    for stage in module.stages:
        graph = module.stage_graph(stage.index, FORWARD)
        if graph is not None and module.outputs[0] in {v.name for v in graph.outs} - {v.name for v in graph.ins}:
            return stage.index
    return None


def leads(module: Module, rank: int) -> bool:
    """Return whether a rank is the first of its team, which reports what all of them have."""
    assert module.schedule is not None
    return any(team[0] == rank for teams in module.schedule.teams().values() for team in teams)


def reports(module: Module, rank: int) -> bool:
    """Return whether a rank reports the losses of its microbatches."""
    return module.rank_stages()[rank] == loss_stage(module) and leads(module, rank)


def microbatch_size(module: Module) -> int:
    """Return the samples per microbatch: the greatest common divisor of the first dimensions of all inputs."""
    return gcd(*(value.type.dims[0] for value in module.inputs if value.type.rank)) or 1
