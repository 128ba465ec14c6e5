"""The parts of a batch: samples of a microbatch, microbatches of a rank, inputs of a stage, the stage of the loss.

In: a module with stages and a schedule. Out: plain facts about it, which nothing is decided by here.

Samples lie along the first dimension of inputs and outputs, or along the one that `Module.batch` names. An input that
`Module.batch` calls whole makes a microbatch one sample, all of whose rows lie along the first dimension. An output
that it calls whole belongs to a microbatch, not to its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from .action_kinds import BACKWARD, FORWARD, UPDATE
from .graph import MICROBATCH, Module
from .schedule import READERS
from .types import TensorType


def fed_inputs(module: Module, stage: int) -> tuple[str, ...]:
    """Return the module inputs that a stage takes from the data, rather than from another stage; sizes of requests
    among them."""
    received = {value.name for edge in module.edges if edge.dst == stage for value in edge.values}
    listed = [value.name for value in module.inputs if value.name != MICROBATCH]
    names = set(listed) - received
    graphs = [module.stage_graph(stage, kind) for kind in READERS]
    read = {value.name for graph in graphs if graph is not None for value in graph.ins}
    sent = {value.name for edge in module.edges if edge.src == stage and edge.phase == FORWARD for value in edge.values}
    return tuple(name for name in listed if name in names & (read | sent))


def fed_to_rank(module: Module, rank: int) -> tuple[str, ...]:
    """Return the module inputs that the stages of a rank take from the data."""
    return tuple(dict.fromkeys(name for stage in module.rank_packs()[rank] for name in fed_inputs(module, stage)))


def share_of(module: Module, rank: int) -> list[int]:
    """Return the microbatches of a batch that a rank runs."""
    assert module.schedule is not None
    m = module.schedule.microbatches
    return sorted({action.mb % m for action in module.schedule.ranks[rank].batch if action.kind == FORWARD})


def updating_stages(module: Module) -> list[int]:
    """Return the stages that run no forward, but updates of variables that other stages read."""
    return [
        s.index
        for s in module.stages
        if module.stage_graph(s.index, UPDATE) and not module.stage_graph(s.index, FORWARD)
    ]


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
    return loss_stage(module) in module.rank_packs()[rank] and leads(module, rank)


def microbatch_size(module: Module) -> int:
    """Return the samples per microbatch: the greatest common divisor of what inputs have along the dimension of their
    samples. One where the samples of an input cannot be told apart."""
    if any(value.name in module.batch and module.batch[value.name] is None for value in module.inputs):
        return 1
    return gcd(*(value.type.dims[module.batch.get(value.name) or 0] for value in module.inputs if value.type.rank)) or 1


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The place of samples in an array: along `axis`, each with so many rows."""

    axis: int
    rows: int

    def count(self, array: np.ndarray) -> int:
        """Return the rows of an array along the axis."""
        return int(array.shape[self.axis])

    def take(self, array: Any, rows: slice | np.ndarray) -> Any:
        """Return some rows of an array, or of a column that is indexed like one."""
        return array[(slice(None),) * self.axis + (rows,)] if self.axis else array[rows]

    def part(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the samples from `start` to `stop`, as a view."""
        part: np.ndarray = self.take(array, slice(start * self.rows, stop * self.rows))
        return part

    def joined(self, flat: np.ndarray, dims: Sequence[int]) -> np.ndarray:
        """Return an array of samples that lie one after the other in memory."""
        if not self.axis:
            return flat.reshape(-1, *dims[1:])
        apart = flat.reshape(-1, *self.shape(dims, 1))
        return np.moveaxis(apart, 0, self.axis).reshape(self.shape(dims, len(apart)))

    def shape(self, dims: Sequence[int], samples: int) -> tuple[int, ...]:
        """Return the shape of so many samples."""
        return (*dims[: self.axis], samples * self.rows, *dims[self.axis + 1 :])


def per_sample(type: TensorType, place: SampleRows | None) -> int:
    """Return the elements of a sample; none of a scalar."""
    return 0 if place is None else prod(place.shape(type.dims, 1))


def sample_rows(module: Module) -> dict[str, SampleRows]:
    """Return where samples lie in each input; scalars, which every microbatch gets whole, have none."""
    samples = microbatch_size(module)
    axes = {v.name: module.batch.get(v.name) or 0 for v in module.data_inputs if v.type.rank}
    return {
        v.name: SampleRows(axes[v.name], v.type.dims[axes[v.name]] // samples)
        for v in module.data_inputs
        if v.name in axes
    }
