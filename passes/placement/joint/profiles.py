"""The joint problem: a graph of layers, each measured for several tensor parallel degrees, and equal devices.

A plan is a sequence of stages. A stage has a contiguous set of layers, with an option for each. It has a tensor
parallel degree t, and a data parallel degree d that divides the microbatches N of a batch: t x d devices. With B the
bandwidth of a device in bytes, and s the sum of the data parallel degrees of a stage and of all that follow it:

    time(stage)   = sum of  time / d  +  4 (d - 1) / (d N B) x parameters  +  2 / (d B) x boundary   over its layers
    boundary      = bytes of each edge to or from other stages, with what the option adds for that edge
    memory(stage) = sum of  saved x ceil(s / d) + fixed                                              over its layers

The first counts the layer's own collectives. The second is a sum of gradients by parameter servers. The third is an
activation and its gradient. The time per sample of a plan is that of its slowest stage. Piper (Tarnawski et al.,
NeurIPS 2021) has this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.passes.placement.problem import gap_between


@dataclass(frozen=True, slots=True)
class LayerOption:
    """A way to run a layer on so many devices. `saved` are bytes per microbatch in flight, `fixed` those beside them.

    `incoming` and `outgoing` have extra bytes per edge that leads to another stage, by the layer at its other end.
    """

    name: str
    time: float
    parameters: float
    saved: float
    fixed: float
    incoming: Mapping[int, float]
    outgoing: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """A layer. `options[t]` are its options under tensor parallel degree t."""

    name: str
    options: Mapping[int, tuple[LayerOption, ...]]


@dataclass(frozen=True, slots=True)
class JointProblem:
    """The problem. `edges` are pairs of positions in `layers` with bytes for each sample."""

    devices: int
    memory: float
    bandwidth: float
    microbatches: int
    layers: tuple[LayerProfile, ...]
    edges: Mapping[tuple[int, int], float]

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor parallel degrees that a layer has options for, and that there are devices for."""
        degrees = {t for layer in self.layers for t, options in layer.options.items() if options}
        return tuple(sorted(t for t in degrees if t <= self.devices))

    @property
    def data_degrees(self) -> tuple[int, ...]:
        """Data parallel degrees that divide the microbatches, and that there are devices for."""
        most = min(self.devices, self.microbatches)
        return tuple(d for d in range(1, most + 1) if self.microbatches % d == 0)

    def holds(self, memory: float) -> bool:
        """Return whether a device has room for so many bytes, to twelve digits."""
        return memory <= self.memory * (1 + 1e-12)


@dataclass(frozen=True, slots=True)
class JointStage:
    """A stage of a plan. `options` has the name of the option of each layer, by its position."""

    tensor: int
    data: int
    options: Mapping[int, str]

    @property
    def devices(self) -> int:
        return self.tensor * self.data


@dataclass(frozen=True, slots=True)
class StageCost:
    """The time of a stage per sample, its parts, the bytes of each device, and the microbatches in flight."""

    compute: float
    gradients: float
    boundary: float
    memory: float
    in_flight: int

    @property
    def total(self) -> float:
        return self.compute + self.gradients + self.boundary


@dataclass(frozen=True, slots=True)
class JointPlan:
    """A plan with its time per sample. No plan takes less than `bound`."""

    problem: JointProblem
    stages: tuple[JointStage, ...]
    value: float
    bound: float
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The most that the value can be above the optimum, as a part of the value."""
        return gap_between(self.value, self.bound)


def stage_costs(problem: JointProblem, stages: Sequence[JointStage]) -> list[StageCost]:
    """Return the cost of every stage, from the definition."""
    costs = []
    for i, stage in enumerate(stages):
        d = stage.data
        in_flight = -(-sum(later.data for later in stages[i:]) // d)
        compute = gradients = boundary = memory = 0.0
        for layer, name in stage.options.items():
            option = next(each for each in problem.layers[layer].options[stage.tensor] if each.name == name)
            compute += option.time / d
            gradients += 4 * (d - 1) / (d * problem.microbatches * problem.bandwidth) * option.parameters
            memory += option.saved * in_flight + option.fixed
            for (source, target), moved in problem.edges.items():
                if target == layer and source not in stage.options:
                    boundary += 2 / (d * problem.bandwidth) * (moved + option.incoming.get(source, 0.0))
                if source == layer and target not in stage.options:
                    boundary += 2 / (d * problem.bandwidth) * (moved + option.outgoing.get(target, 0.0))
        costs.append(StageCost(compute, gradients, boundary, memory, in_flight))
    return costs


def check_plan(problem: JointProblem, stages: Sequence[JointStage]) -> float:
    """Return the time per sample of a plan, infinity where it is not allowed."""
    stage_of = {layer: i for i, stage in enumerate(stages) for layer in stage.options}
    allowed = (
        len(stage_of) == sum(len(stage.options) for stage in stages) == len(problem.layers)
        and all(stage_of[source] <= stage_of[target] for source, target in problem.edges)
        and all(problem.microbatches % stage.data == 0 for stage in stages)
        and sum(stage.devices for stage in stages) <= problem.devices
        and sum(stage.data for stage in stages) <= problem.microbatches
    )
    costs = stage_costs(problem, stages)
    if not allowed or not all(problem.holds(cost.memory) for cost in costs):
        return inf
    return max(cost.total for cost in costs)
