"""Updates on stages of their own: the same numbers by the interpreter, what the checker refuses, and their time."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from tests.ir.verify.edits import edited, message

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Edge
from penstock.ir.grid import message_rules, play
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import UsageError

from .test_guard import M, batches_of, network, weights_of


@functools.cache
def program(kind="1f1b", *, update_on=(), tied=False, clip=0.5, stages=2, **options):
    """Layers on so many of five devices, with updates there or elsewhere."""
    settings = PipelineOptions(
        schedule=kind, microbatches=M, update_on=update_on, guard={"clip": clip} if clip else None, **options
    )
    cuts = {
        "split_at": tuple(f"layer{i}" for i in range(1, stages)),
        "devices": tuple(f"cpu:{i}" for i in range(stages)),
    }
    calls = training_pipeline({"kind": "adamw", "lr": 0.01}, cuts, settings)
    module = run_passes(network(tied=tied).but(cluster=Cluster.local(5)), calls, PASSES)
    verify(module)
    return module


def numbers(module, tied=False):
    run = run_schedule(module, weights_of(network(tied=tied)), batches_of(4), precision="typed")
    losses = [float(values["loss"]) for _, values in sorted(run.outputs.items())]
    norms = [float(values["gradient.norm"]) for values in run.handed_out.values() if "gradient.norm" in values]
    return losses, norms


@pytest.mark.parametrize(
    ("kind", "tied"), [("1f1b", True), ("2bw", False), ("2bw", True), ("zb-1f1b", False), ("eager-2bw", False)]
)
def test_the_same_numbers_to_the_last_bit(kind, tied):
    """A tied parameter is updated once, for all stages that read it."""
    for clip, stages in ((0.0, 1), (0.5, 3)):
        here, away = (program(kind, tied=tied, clip=clip, stages=stages, update_on=on) for on in ((), ("cpu:4",)))
        assert numbers(away, tied) == numbers(here, tied)
        assert len(numbers(here, tied)[1]) == (4 if clip else 0)
        assert parse_module(print_module(away)) == away
    # The control: gradients that are not clipped.
    assert numbers(program(kind, tied=tied, clip=0.0, stages=3, update_on=("cpu:4",)), tied) != numbers(here, tied)


def test_state_is_where_updates_are_and_weights_on_both():
    away = program(update_on=("cpu:4",), stages=3)
    assert away.rank_devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:4"]
    assert {var.stage for var in away.vars.values() if var.name.endswith(("adam_m", "adam_v"))} == {3}
    assert {var.stage for var in away.vars.values() if var.role == "param"} == {None}
    assert {(e.src, e.dst) for e in away.edges if e.phase == "U"} == {(3, 0), (3, 1), (3, 2)}
    kinds = {op.kind for stage in range(3) for op in away.stage_graph(stage, "U").ops}
    assert "adamw" not in kinds


# rank, (old, new) words, what the message must say
REFUSED = [
    (2, (" 2SU1>0", ""), "(2U0@1): its results are never sent to stage 0 (2SU0>0)"),
    (0, ("0RU0<2 ", ""), "(0U0@1): runs before its inputs from stage 2 have arrived (0RU0<2)"),
    (2, ("2RP1<0 ", ""), "(2U0@1): runs before its inputs from stage 0 have arrived (2RP0<0)"),
    (2, ("2RP1<1 2U1@2", "2U1@2 2RP1<1"), "(2U0@1): runs before its inputs from stage 1 have arrived (2RP0<1)"),
    (0, ("0P1 0SP1>2", "0SP1>2 0P1"), "(0SP0>2): sends what 0P0 has not computed yet"),
    (2, ("2U1@2 2SU1>0", "2SU1>0 2U1@2"), "(2SU0>0): sends what 2U0 has not computed yet"),
    (0, ("0RU0<2 0U0@1 ", ""), "rank 0: never runs @s0.U for batch 0"),
]


@pytest.mark.parametrize(("rank", "pair", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_the_checker_refuses(rank, pair, said):
    assert said in message(edited(program("2bw", update_on=("cpu:4",)), rank, pair))


def test_stages_without_forwards_hand_out_weights():
    away = program("2bw", update_on=("cpu:4",))
    update = away.stage_graph(2, "U")
    assert "hands out no new weights" in message(away.with_graph(replace(update, outs=())), "staged")
    # Weights that are no longer those that the update made.
    lost = tuple(replace(e, values=e.values[1:]) if (e.phase, e.dst) == ("U", 0) else e for e in away.edges)
    assert "edge 2>0 U" in message(away.but(edges=lost), "wired")
    assert all(isinstance(edge, Edge) for edge in lost)


def test_one_error_names_all_that_has_no_meaning():
    with pytest.raises(UsageError) as caught:
        program(update_on=("cpu:1", "cpu:9", "cpu:9"))
    for said in ("cpu:1 computes stage 1", "cpu:9 is named twice", "cpu:9 is no device of the cluster"):
        assert said in str(caught.value)


def period(module, update):
    """The time of one more batch, where a forward takes 1, a backward 2, and updates as much as given by stage."""
    spent = {"F": 1.0, "B": 2.0}
    ends = []
    for batches in (8, 16):
        programs = module.schedule.expand_all(batches)
        played = play(
            programs,
            message_rules(module.schedule),
            lambda a: update.get(a.stage, 0.1) if a.kind == "U" else spent.get(a.kind, 0.0),
        )
        assert not played.stuck
        ends.append(played.finish)
    return (ends[1] - ends[0]) / 8


def test_a_batch_of_slack_hides_a_slow_update_and_one_that_drains_shows_all_of_it():
    """The update takes three times as long as forward and backward of a microbatch."""
    slow, quick = {2: 9.0}, {0: 0.1, 1: 0.1}
    late, late_here = (program("2bw", update_on=on) for on in (("cpu:4",), ()))
    assert period(late, slow) == pytest.approx(period(late_here, quick), rel=0.03)
    drained, drained_here = (program("1f1b", update_on=on) for on in (("cpu:4",), ()))
    assert period(drained, slow) == pytest.approx(period(drained_here, quick) + 9.0, rel=0.03)
    # The control: an update that takes longer than a batch of 12.
    assert period(late, {2: 18.0}) > 18.0
