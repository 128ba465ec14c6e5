"""The interpreter of schedules on meshes with several axes: equal to the whole module on one device, and what is wrong
is found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.oracles.sharding.local_modules import LocalCase, local_mlp

from penstock.ir.graph import Mesh, Module, Op
from penstock.ir.interpreter.recurrence import InterpretedRun, run_recurrence
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.schedule import Schedule
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.support.errors import VerifyError

TIGHT = 1e-10
GRID = [
    (kind, stages, dp, tp)
    for kind, stages, (dp, tp) in itertools.product(
        ["1f1b", "gpipe", "2bw", "zb-1f1b"], [1, 2], [(1, 2), (2, 1), (2, 2), (1, 3)]
    )
]


def _compare(case: LocalCase, run: InterpretedRun, batches: int, delay: int) -> None:
    """Check that a run has the numbers of the whole module on one device."""
    whole = run_recurrence(case.whole, case.weights, case.batches(batches), delay)
    np.testing.assert_allclose(run.losses, whole.losses, rtol=TIGHT, atol=TIGHT)
    assert run.variables.keys() == whole.variables.keys()
    for name, array in whole.variables.items():
        np.testing.assert_allclose(run.variables[name], array, rtol=TIGHT, atol=TIGHT, err_msg=name)


def _run(module: Module, case: LocalCase, batches: int = 3) -> InterpretedRun:
    return run_schedule(module, case.weights, case.batches(batches))


@pytest.mark.parametrize(("kind", "stages", "dp", "tp"), GRID)
def test_local_form_is_the_whole_module(kind: str, stages: int, dp: int, tp: int) -> None:
    case = local_mlp(kind, stages, dp, tp)
    run = _run(case.local, case)
    _compare(case, run, 3, SCHEDULES[kind].delay)
    # A team is in the log once.
    assert len({entry[:3] for entry in run.log}) == len(run.log)


@pytest.mark.parametrize(("hidden", "tp"), [(5, 2), (5, 3), (2, 3)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parts_with_padding_are_the_whole_module(hidden: int, tp: int, optimizer: str) -> None:
    """Parts that reach beyond the tensor, one of them with nothing else."""
    case = local_mlp("1f1b", 1, 2, tp, hidden=hidden, optimizer=optimizer)
    _compare(case, _run(case.local, case), 3, 0)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["1f1b", "2bw"])
def test_the_norm_of_split_gradients_is_that_of_the_whole(kind: str, stages: int) -> None:
    """Updates hand norms round, with collectives in what is done once per batch."""
    case = local_mlp(kind, stages, 2, 2, guard={"clip": 0.01})
    assert any(op.kind == "all_reduce" for name, g in case.local.graphs.items() if name.endswith("N") for op in g.ops)
    run = _run(case.local, case)
    _compare(case, run, 3, SCHEDULES[kind].delay)


@pytest.mark.parametrize("last", ["communicate", "fuse"])
def test_without_messages_values_come_from_equal_places(last: str) -> None:
    case = local_mlp("1f1b", 2, 2, 2, last=last)
    schedule = case.local.schedule
    assert schedule is not None
    bare = schedule.rewrite(lambda a: (a,) if a.peer is None else ())
    facts = tuple(fact for fact in case.local.facts if fact != "wired")
    module = case.local.but(schedule=bare, edges=(), facts=facts)
    _compare(case, _run(module, case), 3, 0)


def test_a_later_run_goes_on_where_one_ended() -> None:
    case = local_mlp("2bw", 2, 2, 2)
    batches = case.batches(4)
    whole = run_schedule(case.local, case.weights, batches)
    first = run_schedule(case.local, case.weights, batches[:2])
    later = run_schedule(case.local, first.variables, batches[2:], first=2, previous=first.previous)
    for name, array in whole.variables.items():
        np.testing.assert_array_equal(later.variables[name], array, err_msg=name)


# ------------------------------------------------------------------------------------------------ controls


def _without(module: Module, name: str, number: int) -> Module:
    """Return the module with an all_reduce that does nothing."""
    graph = module.graphs[name]
    places = [i for i, op in enumerate(graph.ops) if op.kind == "all_reduce"]
    op = graph.ops[places[number]]
    ops = list(graph.ops)
    ops[places[number]] = Op("cast", op.ins, op.outs, {"dtype": op.outs[0].type.dtype})
    return module.with_graph(replace(graph, ops=tuple(ops)))


@pytest.mark.parametrize(("name", "number"), [("s0.F", 0), ("s0.F", 1), ("s0.B", 0), ("s0.B", 1)])
def test_a_dropped_all_reduce_is_found(name: str, number: int) -> None:
    case = local_mlp("1f1b", 1, 1, 2)
    with pytest.raises((AssertionError, VerifyError), match=r"Not equal|different|differs"):
        _compare(case, _run(_without(case.local, name, number), case), 3, 0)


def test_a_rank_of_a_team_with_swapped_actions_waits_for_ever() -> None:
    case = local_mlp("gpipe", 1, 1, 2)
    schedule = case.local.schedule
    assert schedule is not None
    batch = list(schedule.ranks[1].batch)
    batch[:2] = batch[1::-1]
    ranks = {**schedule.ranks, 1: replace(schedule.ranks[1], batch=tuple(batch))}
    module = case.local.but(schedule=Schedule(schedule.name, schedule.microbatches, ranks))
    with pytest.raises(VerifyError, match="rank 0, step 0: 0F0@0 waits for rank 1, which is in 0F1@0"):
        _run(module, case)


class _WrongSums(Schedule):
    """A schedule whose sums go over the ranks of a team."""

    def replicas(self) -> dict[int, tuple[int, ...]]:
        return {rank: team for teams in self.teams().values() for team in teams for rank in team}


def test_a_sum_over_the_wrong_group_is_found() -> None:
    case = local_mlp("1f1b", 1, 2, 2)
    schedule = case.local.schedule
    assert schedule is not None
    module = case.local.but(schedule=_WrongSums(schedule.name, schedule.microbatches, schedule.ranks))
    with pytest.raises((AssertionError, VerifyError), match=r"Not equal|different|differs"):
        _compare(case, _run(module, case), 3, 0)


def test_an_order_of_devices_that_is_not_the_meshs_is_found() -> None:
    """Axes in the other order make other teams than the schedule has."""
    case = local_mlp("1f1b", 1, 2, 2)
    (mesh,) = case.local.meshes
    module = case.local.but(meshes=(Mesh(mesh.name, mesh.axes[::-1], mesh.devices),))
    with pytest.raises(VerifyError, match="the group of place 0 is 0, 2, not all of which run the graph"):
        _compare(case, _run(module, case), 3, 0)
