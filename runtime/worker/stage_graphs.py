"""The graphs of a stage, and what they say of values: which go to whom, and which are kept behind an action.

In: a module, a stage, and the stages of its rank. Out: facts that the executor looks up for every action. A model with
bounded dimensions has them once for each rung of its ladder (`sizes_of`): a microbatch runs on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.backends.bundle.format import Bundle
from penstock.backends.interface import graph_on_rung
from penstock.ir.action_kinds import AGAIN, BACKWARD, FORWARD, NORM_PARTS, PARTS, UPDATE, WEIGHTS
from penstock.ir.batch_shares import fed_inputs
from penstock.ir.graph import Graph, Module, signature
from penstock.ir.ladder.ladder import Ladder
from penstock.ir.memory.items import stage_images, users_of
from penstock.ir.memory.update_parts import computation_of, update_parts
from penstock.ir.schedule import ADDERS, COMPUTE, PHASES, SEND_OF

# The name of the only size of a model without bounded dimensions.
ONE_SIZE = ""


class StageGraphs:
    """The graphs of a stage at one size of the model. `called` gives the name of a graph in the library of the stage;
    `pack` are the stages of the rank."""

    def __init__(
        self, module: Module, stage: int, pack: Sequence[int], called: Callable[[str], str] = lambda name: name
    ) -> None:
        self.module = module
        graphs = {kind: module.stage_graph(stage, kind) for kind in COMPUTE}
        self.graphs: dict[str, Graph] = {kind: graph for kind, graph in graphs.items() if graph is not None}
        parts = {computation_of(part): part for part in update_parts(module, stage).values()}
        # By what an action computes: an update may run in parts.
        self.calls = {
            name: (called(graph.name), signature(graph).slots, tuple(value.name for value in graph.results))
            for name, graph in {**self.graphs, **parts}.items()
        }
        self.taken = {name: graph.ins for name, graph in {**self.graphs, **parts}.items()}
        # The items that a computation touches, whose copies it waits for.
        self.touched: dict[str, list[str]] = {}
        for item, image in stage_images(module, stage).items():
            for name in users_of(module, stage, image):
                self.touched.setdefault(name, []).append(item)
        leaving = [edge for edge in module.edges if edge.src == stage]
        sent: dict[str, set[str]] = {phase: set() for phase in PHASES}
        # The values that other stages of this rank take, by phase and stage.
        self.handed: dict[str, list[tuple[int, list[str]]]] = {phase: [] for phase in PHASES}
        for edge in leaving:
            names = [value.name for value in edge.values]
            if edge.dst in pack:
                self.handed[edge.phase].append((edge.dst, names))
            else:
                sent[edge.phase] |= set(names)
        for_backward, for_weights, for_again = self._taken(*ADDERS), self._taken(WEIGHTS), self._taken(AGAIN)
        saved, again = self._saved(FORWARD), self._saved(AGAIN)
        # What F sends and R makes anew is not held between the two.
        held = (for_backward | for_again) - (again - saved)
        self.after_forward = frozenset(held | sent[FORWARD])
        self.after_again, self.after_letting_go = frozenset(for_backward), frozenset(held - again)
        # With W split off, B keeps what W takes.
        sent_back = sent[BACKWARD]
        self.after_backward = {BACKWARD: frozenset(sent_back | for_weights), WEIGHTS: frozenset(sent_back)}
        for_norm, for_update = self._taken(NORM_PARTS), self._taken(UPDATE)
        self.sent_later = {
            SEND_OF[FORWARD]: frozenset(held),
            SEND_OF[BACKWARD]: frozenset(for_weights),
            SEND_OF[PARTS]: frozenset(for_norm | for_update),
            SEND_OF[NORM_PARTS]: frozenset(for_update),
            SEND_OF[UPDATE]: frozenset(),
        }
        # What an update hands out to other ranks.
        self.new_weights = frozenset(sent[UPDATE])

    def _saved(self, kind: str) -> set[str]:
        """Return the names of what a graph of the stage saves."""
        return {value.name for value in self.graphs[kind].saved} if kind in self.graphs else set()

    def _taken(self, *kinds: str) -> set[str]:
        """Return the names of what graphs of the stage take."""
        return {value.name for kind in kinds if kind in self.graphs for value in self.graphs[kind].ins}


def ladder_of_ranks(bundle: Bundle) -> Ladder[Module]:
    """Return the rungs that the ranks of a bundle run requests on: those on which all of them do what they do on the
    largest, with the same variables and inputs. A request of another rung takes a larger one."""
    largest = bundle.ladder.largest
    does = _work(largest.held)
    return Ladder([rung for rung in bundle.ladder if rung is largest or _work(rung.held) == does])


def sizes_of(bundle: Bundle) -> dict[str, Module]:
    """Return the modules of the rungs that ranks run requests on, the largest first."""
    if not bundle.module.bounds:
        return {ONE_SIZE: bundle.module}
    ladder = ladder_of_ranks(bundle)
    return {ladder.largest.name: ladder.largest.held} | {rung.name: rung.held for rung in ladder}


def library_name(bundle: Bundle, rung: str) -> Callable[[str], str]:
    """Return the function from the name of a rung's graph to that in the library of its stage."""
    ladder = bundle.ladder
    of_name = next((one for one in ladder if one.name == rung), ladder.largest)
    return lambda graph: graph_on_rung(ladder, of_name, graph)


def _work(module: Module) -> tuple[object, ...]:
    """Return what a module says of the work of its ranks, apart from sizes."""
    ends = sorted((edge.src, edge.dst, edge.phase) for edge in module.edges)
    fed = [fed_inputs(module, stage.index) for stage in module.stages]
    return module.schedule, ends, module.vars, fed, list(module.graphs)
