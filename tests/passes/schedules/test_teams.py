"""Schedules of meshes with several axes: teams share out microbatches, and the ranks of a team do the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.oracles.sharding.local_modules import local_mlp

from penstock.ir.action_kinds import FORWARD, SUM
from penstock.ir.graph import Module, Value
from penstock.ir.schedule import RECEIVES, SENDS, Action, Program, Schedule
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import TensorType
from penstock.ir.verify.verifier import verify
from penstock.support.errors import VerifyError

MESHES = [(1, 2), (2, 1), (2, 2), (1, 3), (2, 3)]
KINDS = ["1f1b", "gpipe", "2bw", "eager-2bw", "zb-1f1b"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_ranks_of_a_team_do_the_same_and_teams_share_out(kind: str, stages: int, dp: int, tp: int) -> None:
    module = local_mlp(kind, stages, dp, tp, last="communicate").local
    schedule = module.schedule
    assert schedule is not None
    assert schedule.teams() == {
        s: tuple(tuple(s * dp * tp + d * tp + t for t in range(tp)) for d in range(dp)) for s in range(stages)
    }
    alone = local_mlp(kind, stages, dp, 1, last="communicate").local.schedule
    assert alone is not None
    for rank, program in schedule.ranks.items():
        team, place = divmod(rank, tp)
        own = [[a._replace(peer=None) for a in part] for part in (program.start, program.batch)]
        other = alone.ranks[team]
        assert own == [[a._replace(peer=None) for a in part] for part in (other.start, other.batch)]
        # Messages go between equal places.
        peers = {a.peer for a in (*program.start, *program.batch) if a.kind in (*SENDS, *RECEIVES)}
        assert {peer % tp for peer in peers if peer is not None} <= {place}
    groups = schedule.replicas()
    assert all(groups[rank] == tuple(sorted(groups[rank])) and rank in groups[rank] for rank in schedule.ranks)
    assert all(len(group) == dp and len({r % tp for r in group}) == 1 for group in groups.values())
    assert any(a.kind == SUM for a in schedule.actions()) == (dp > 1)
    assert parse_module(print_module(module)) == module


def _changed(module: Module, rank: int, batch: tuple[Action, ...]) -> Module:
    schedule = module.schedule
    assert schedule is not None
    program = Program(schedule.ranks[rank].start, batch)
    return module.but(schedule=Schedule(schedule.name, schedule.microbatches, {**schedule.ranks, rank: program}))


def test_a_rank_of_a_team_with_swapped_actions_is_found() -> None:
    module = local_mlp("gpipe", 1, 2, 2).local
    verify(module)
    assert module.schedule is not None
    batch = list(module.schedule.ranks[1].batch)
    assert batch[0].kind == batch[1].kind == FORWARD
    batch[:2] = batch[1::-1]
    with pytest.raises(VerifyError, match="rank 0 of the same team does 0F4@1 there"):
        verify(_changed(module, 1, tuple(batch)))
    # Teams may do their microbatches in any order, each of them as a whole.
    both = _changed(_changed(module, 1, tuple(batch)), 0, tuple(batch))
    verify(both)


def test_a_microbatch_of_two_teams_is_found() -> None:
    module = local_mlp("1f1b", 1, 2, 2).local
    assert module.schedule is not None
    for rank in (2, 3):
        module = _changed(module, rank, module.schedule.ranks[0].batch)
    with pytest.raises(VerifyError, match="run by ranks 0, 2, expected one"):
        verify(module)


def test_a_rank_of_another_team_is_found() -> None:
    """Ranks 1 and 2 have each other's microbatches: teams by microbatch are not those of the mesh then."""
    module = local_mlp("1f1b", 1, 2, 2).local
    assert module.schedule is not None
    first, second = (module.schedule.ranks[rank].batch for rank in (1, 2))
    with pytest.raises(VerifyError, match="of the same team does"):
        verify(_changed(_changed(module, 1, second), 2, first))


def test_local_types_are_those_of_the_mesh() -> None:
    module = local_mlp("1f1b", 1, 1, 2, last="fuse").local
    for change, match in (
        ({"vars": {**module.vars, "up0": replace(module.vars["up0"], type=TensorType("f32", (4, 6)))}}, r"f32\[4,6\]"),
        ({"inputs": (Value("x", TensorType("f32", (3, 4)).laid([(), ("tp",)])), module.inputs[1])}, "equal names"),
    ):
        with pytest.raises(VerifyError, match=match):
            verify(module.but(**change))


@pytest.mark.parametrize(
    ("name", "type", "match"),
    [
        ("mesh.tp", TensorType("i64", ()), ""),
        ("mesh.tp", TensorType("i64", (1,)), r"a coordinate is i64\[\]"),
        ("mesh.sp", TensorType("i64", ()), "the axes of the mesh of stage 0 are dp, tp"),
        ("mesh", TensorType("i64", ()), "nobody provides"),
    ],
)
def test_coordinates_have_a_provider(name: str, type: TensorType, match: str) -> None:
    module = local_mlp("1f1b", 1, 1, 2, last="fuse").local
    graph = module.graphs["s0.F"]
    module = module.with_graph(replace(graph, ins=(*graph.ins, Value(name, type))))
    if not match:
        verify(module)
        return
    with pytest.raises(VerifyError, match=match):
        verify(module)
