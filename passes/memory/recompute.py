"""Save less between forward and backward where memory is short, and compute it again: the pass `recompute`.

In: staged, wired graphs and their schedule. Out: for each stage one of three fates of what its forward saves. It is
kept; or made again by a graph R of its own, whose action stands in front of the receive of the gradient, where the rank
would wait; or made again by copies in B (repeated.py has both).

R runs for the microbatches that need it. Where all do, F does not save what R makes. Where some keep it, F saves it,
and L lets go of it for the others.

Modes: `none`; `all`: a microbatch keeps the inputs of the stage, draws, and nothing else until its backward, unless
that follows its forward at once; `auto`: a stage with a predicted peak within its budget stays as it is. Otherwise it
computes again the cheapest set with a predicted peak that fits. Peaks are those of ir/memory/predict.py on fused
graphs, seconds those of passes/costs/prices.py on the stage's device. Sets that are tried:

  * the chain planner (recompute_chain.py) on the stage as a chain: where a single value crosses from earlier to later
    operations, that value is an element, and all that is saved between two of them is one;
  * single operations, those that cost least for their bytes first, alone and on top of chain choices;
  * of the cheapest of these that fits, what can be kept after all, and for R the most microbatches that can keep it.

R makes a whole set at once, so it may need more memory than copies in B. Where both fit, the schedule is played with
the seconds of either (ir/grid.py), and R is taken unless copies in B are faster.

Where the pass `offload` has sent what a stage saves elsewhere, R or B makes a part of it again, and the rest is
elsewhere still. Peaks are those of both together, so a stage that fits with its moves alone computes nothing again.
Where no choice fits, one without moves is looked for. Moves that memory asks for no longer are left out.

The stages of a rank are taken in order, each with what those before it save. Limits: the chain model is exact on
chains, the choice on graphs is not; W takes what R made, so that is held until then; a stage with W has no copies in B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.ir.action_kinds import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.cluster.cluster import TAKEN, Device
from penstock.ir.graph import PARAM, Graph, Module
from penstock.ir.grid import message_rules, play
from penstock.ir.memory.predict import Memory
from penstock.ir.memory.saved_sets import saved_set
from penstock.ir.schedule import COMPUTE, Action
from penstock.passes.costs.prices import GraphCost
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.support.errors import DoesNotFit, UsageError
from penstock.support.words import exact_bytes, itemised, shown_bytes

from .notes_elsewhere import with_notes
from .offload import with_fewer_sets, without_idle_sets
from .overlap_that_fits import later_peaks
from .saved_elsewhere import without_saved_sets
from .saved_values import RecomputedStage, SavedValuesSearch

MODES = ("auto", "none", "all")
# The batches that are played to compare two ways.
_PLAYED = 3


@dataclass(frozen=True, slots=True)
class RecomputeOptions:
    """Options of `recompute`. `mode` is auto, none or all. `budget` is in bytes for each stage; 0 means the memory of
    its device."""

    mode: str = "auto"
    budget: int = 0


def recompute(module: Module, options: RecomputeOptions = RecomputeOptions()) -> Module:
    """Save less for the backward pass where memory is short, and compute it again there."""
    if options.mode not in MODES:
        raise UsageError(f"unknown mode {options.mode!r}, expected one of {', '.join(MODES)}", where="recompute")
    if module.schedule is None:
        raise UsageError("the module has no schedule", where="recompute", hint="run the schedule pass first")
    if options.mode == "none":
        return module
    choice = _Choice(module, options)
    for stage in module.stages:
        choice.take(stage.index)
    return choice.result()


class _Choice:
    """The choice for one stage after the other. `module` and `fused` have what was chosen so far, without kernels and
    with them."""

    def __init__(self, module: Module, options: RecomputeOptions) -> None:
        self.before = self.module = module
        self.fused: Module | None = None
        self.options = options
        # What is made again by stage, with the search that says so and the budget, 0 for none.
        self.chosen: dict[int, tuple[SavedValuesSearch, RecomputedStage, int]] = {}
        # The stages whose saved sets were elsewhere, and have less in them now or none.
        self.changed: set[int] = set()
        # The refusals of stages that do not fit, and how far each is from fitting, by rank.
        self.problems: dict[tuple[int, ...], str] = {}
        self.excess: dict[int, float] = {}
        self.needs: dict[str, int] = {}

    def take(self, stage: int) -> None:
        """Choose for a stage."""
        device, options = _device(self.module, stage), self.options
        budget = options.budget or device.room or 0
        graphs = {kind: graph for kind in COMPUTE if (graph := self.module.stage_graph(stage, kind)) is not None}
        if not {FORWARD, BACKWARD} <= graphs.keys() or (options.mode == "auto" and not budget):
            return
        self.fused = self.fused or fuse(self.module, FuseOptions())
        first, chosen = self._searched(self.fused, stage, graphs, budget, device)
        is_away = saved_set(self.fused, stage) is not None
        if options.mode == "auto" and is_away and chosen.peak > budget:
            # Copies take memory of their own.
            there = without_saved_sets(self.fused, [stage])
            search, other = self._searched(there, stage, graphs, budget, device)
            if other.peak < chosen.peak:
                first, chosen, self.fused, is_away = search, other, there, False
                self.module = without_saved_sets(self.module, [stage])
                self.changed.add(stage)
        if options.mode == "auto":
            self._judge(stage, chosen, budget, device)
        if chosen.dropped:
            self.module, self.fused = (_applied(module, stage, chosen) for module in (self.module, self.fused))
            self.fused = fuse(self.fused, FuseOptions())
            self.chosen[stage] = first, chosen, budget if options.mode == "auto" else 0
            self.changed |= {stage} if is_away else set()

    def _searched(
        self, fused: Module, stage: int, graphs: Mapping[str, Graph], budget: int, device: Device
    ) -> tuple[SavedValuesSearch, RecomputedStage]:
        """Return what is chosen for a stage, and the search for what R makes."""
        searches = [SavedValuesSearch(fused, stage, graphs, device, in_backward=False)]
        if self.options.mode == "all":
            return searches[0], searches[0].everything()
        if WEIGHTS not in graphs:
            searches.append(SavedValuesSearch(fused, stage, graphs, device, in_backward=True))
        return searches[0], self._cheapest(stage, [search.choose(budget) for search in searches], budget)

    def _cheapest(self, stage: int, ways: Sequence[RecomputedStage], budget: int) -> RecomputedStage:
        """Return the way that fits and whose schedule takes least, the first of equals; where none fits, that with the
        lowest peak."""
        fits = [way for way in ways if way.peak <= budget]
        if not fits:
            return min(ways, key=lambda way: way.peak)
        if len(fits) == 1 or not fits[0].dropped:
            return fits[0]
        return min(fits, key=lambda way: _played(_applied(self.module, stage, way)))

    def _judge(self, stage: int, chosen: RecomputedStage, budget: int, device: Device) -> None:
        """Note a rank that does not fit; its later stages may save less, too."""
        assert self.module.schedule is not None
        libraries, limit = (0, budget) if self.options.budget else (device.taken, device.memory or 0)
        ranks = self.module.schedule.members()[stage]
        self.problems.pop(ranks, None)
        for other in {s for rank in ranks for s in self.module.schedule.stages_of(rank)}:
            self.excess.pop(other, None)
        for name in self.module.devices_of(stage):
            self.needs.pop(name, None)
        if chosen.peak > budget:
            self.excess[stage] = chosen.peak / budget
            self.needs |= dict.fromkeys(self.module.devices_of(stage), chosen.peak + libraries)
            self.problems[ranks] = (
                f"stage {stage} on {', '.join(self.module.devices_of(stage))} needs "
                f"{exact_bytes(chosen.peak + libraries)} at the worst moment, even if {len(chosen.dropped)} operations "
                f"are done again; it has {exact_bytes(limit)}\n    {_listed(chosen.memory, libraries)}"
            )

    def result(self) -> Module:
        """Return the module with all choices; DoesNotFit where a rank needs more than it has."""
        if self.problems:
            hint = "more stages, fewer microbatches in flight or smaller microbatches (--dim) need less"
            what = "no plan fits into memory:" + itemised(list(self.problems.values()))
            raise DoesNotFit(what, hint=hint, excess=self.excess, needs=self.needs)
        if not self.chosen and not self.changed:
            return self.before
        module = self._with_moves() if self.changed else self.module
        return module.noted("recompute", *self._notes(module))

    def _notes(self, module: Module) -> Iterator[str]:
        """Yield what each stage computes again."""
        peaks = later_peaks(module) if self.changed else {}
        for stage, (search, chosen, budget) in self.chosen.items():
            place = ", ".join(module.devices_of(stage))
            # Moves that were left out take other memory.
            peak = max(peaks[rank] for rank in search.ranks) if stage in self.changed else chosen.peak
            yield search.describe(chosen, place, budget, peak)

    def _with_moves(self) -> Module:
        """Return the module with those moves of saved sets that memory still asks for; an error where it asks for
        none."""
        module = without_idle_sets(self.module, self.changed)
        if not self.options.budget:
            module = with_fewer_sets(module, self.changed, as_asked=self.options.mode == "all")
        homes = (stage.home for stage in module.stages), (v.home for v in module.vars.values() if v.role == PARAM)
        if not any(chain(*homes)):
            raise UsageError(
                "forwards keep nothing that has to be elsewhere, as the rest is made again: nothing would be gained",
                where="recompute",
                hint="leave --offload out, or take --offload state",
            )
        return with_notes(module)


def _applied(module: Module, stage: int, way: RecomputedStage) -> Module:
    """Return the module with a way to run a stage."""
    assert module.schedule is not None
    schedule = way.repeated.scheduled(module.schedule, stage)
    return module.but(graphs=_in_place(module.graphs, way.repeated.graphs), schedule=schedule)


def _in_place(graphs: Mapping[str, Graph], changed: Mapping[str, Graph]) -> dict[str, Graph]:
    """Return all graphs with those that changed; a new R stands behind its F."""
    result: dict[str, Graph] = {}
    new = {name: graph for name, graph in changed.items() if name not in graphs}
    for name, graph in graphs.items():
        result[name] = changed.get(name, graph)
        if name.endswith(FORWARD):
            result |= {other: new[other] for other in new if other.rpartition(".")[0] == name.rpartition(".")[0]}
    return result


def _played(module: Module) -> float:
    """Return the seconds of a few batches without the time of messages."""
    assert module.schedule is not None
    seconds = {
        (stage.index, kind): GraphCost.of(graph).seconds(_device(module, stage.index))
        for stage in module.stages
        for kind in COMPUTE
        if (graph := module.stage_graph(stage.index, kind)) is not None
    }

    def duration(action: Action) -> float:
        return seconds.get((action.stage, action.kind), 0.0)

    return play(module.schedule.expand_all(_PLAYED), message_rules(module.schedule), duration).finish


def _listed(memory: Memory, libraries: int) -> str:
    """Format the bytes of a stage at its peak by purpose, and those that its device has taken beside."""
    held = memory.at_peak() | {TAKEN: libraries}
    return ", ".join(f"{purpose} {shown_bytes(count)}" for purpose, count in held.items() if count)


def _device(module: Module, stage: int) -> Device:
    """Return the device of a stage. Of several it is the one with the least memory, as all run the same graphs."""
    names = module.devices_of(stage)
    if module.cluster is None:
        return Device(names[0])
    return min(map(module.cluster.device, names), key=lambda device: device.memory or math.inf)
