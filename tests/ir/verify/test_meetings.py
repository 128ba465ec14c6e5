"""Collectives inside of graphs, as the checker of messages sees them: ranks that would wait for each other in them.

The programs are those of replicas that share variables out, so that every forward and backward has collectives over
`dp`. Controls: the same programs unchanged, and changed where nobody has to wait for ever.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.ir.collective_calls import first_meeting, meeting_ranks
from penstock.ir.graph import Module
from penstock.ir.verify.messages import check_wired
from penstock.ir.verify.verifier import verify
from penstock.models import write_mlp

from .edits import edited, with_batch


def planned(folder: Path, zero: int) -> Module:
    """Return two stages of two replicas each, which share variables out."""
    path = write_mlp(folder / "mlp.onnx", (8,) * 5, batch=4, seed=1)
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=4)
    settings = {"replicas": 2, "zero": zero, "stages": 2, "split_at": ["relu2"], "recompute": "none"}
    return ps.plan(ps.from_onnx(path), ps.Cluster.local(4), training, **settings).module


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return planned(tmp_path_factory.mktemp("model"), zero=3)


def said(module: Module) -> str:
    return "; ".join(f"{problem.where}: {problem.what}" for problem in check_wired(module))


def test_who_meets_is_a_fact_of_graphs(shared_out: Module) -> None:
    verify(shared_out)
    assert [" ".join(map(str, program.batch)) for program in shared_out.schedule.ranks.values()][:2] == [
        "0F4@1 0SF4>2 0F6@1 0SF6>2 0RB4<2 0B4@1 0D4 0RB6<2 0B6@1 0D6 0U1@2",
        "0F5@1 0SF5>3 0F7@1 0SF7>3 0RB5<3 0B5@1 0D5 0RB7<3 0B7@1 0D7 0U1@2",
    ]
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    assert meeting_ranks(shared_out) == {(r, r // 2, kind): pair for r, pair in pairs.items() for kind in "FB"}
    assert str(first_meeting(shared_out, 0, "F")) == "%fc1.weight = all_gather(%fc1.weight.part, over=dp)"
    assert first_meeting(shared_out, 0, "U") is None


def test_replicas_that_meet_in_another_order_are_refused(shared_out: Module) -> None:
    """A rank runs a backward before its last forward, and its replica the forward first. Both wait in the first
    collective of their graph."""
    batch = "0F5@1 0SF5>3 0RB5<3 0B5@1 0D5 0F7@1 0SF7>3 0RB7<3 0B7@1 0D7 0U1@2"
    text = said(with_batch(shared_out, 1, batch))
    assert (
        "ranks 0, 1 meet in different orders: "
        "rank 0 [0F0@0, 0F2@0, 0B0@0, 0B2@0] (0F2@0: %fc1.weight = all_gather(%fc1.weight.part, over=dp)), "
        "rank 1 [0F1@0, 0B1@0, 0F3@0, 0B3@0] (0B1@0: "
        "%fc2.bias.grad.reduce_scatter = reduce_scatter(%fc2.bias.grad, over=dp))"
    ) in text
    # The play comes to an end nowhere either: rank 0 waits for its replica, and that for what it sends.
    assert "deadlock: rank 0 step 2 (0F2@0), %fc1.weight = all_gather(%fc1.weight.part, over=dp), waits for" in text
    # Both replicas in this order: nobody waits.
    other = "0F4@1 0SF4>2 0RB4<2 0B4@1 0D4 0F6@1 0SF6>2 0RB6<2 0B6@1 0D6 0U1@2"
    assert said(with_batch(with_batch(shared_out, 1, batch), 0, other)) == ""


def test_a_circle_of_messages_and_collectives_is_a_deadlock(shared_out: Module) -> None:
    """Rank 0 waits for rank 2, which meets rank 3, which waits for a message that rank 1 sends behind a forward, in
    which it meets rank 0. No message waits for another, and replicas meet in one order."""
    early = edited(shared_out, 0, ("0RB4<2 ", ""), ("0F6@1", "0RB4<2 0F6@1"))
    late = edited(early, 1, ("0SF5>3 0F7@1", "0F7@1 0SF5>3"))
    text = said(late)
    assert "different orders" not in text
    for part in (
        "(0RB0<2) waits for rank 2 step 3 (1SB0>0)",
        "(1F0@0), %fc3.weight = all_gather(%fc3.weight.part, over=dp), waits for rank 3 step 1 (1F1@0)",
        "(1RF1<1) waits for rank 1 step 2 (0SF1>3)",
        "(0F3@0), %fc1.weight = all_gather(%fc1.weight.part, over=dp), waits for rank 0 step 3 (0F2@0)",
    ):
        assert part in text, text
    # Each of the two changes by itself is legal.
    assert said(early) == said(edited(shared_out, 1, ("0SF5>3 0F7@1", "0F7@1 0SF5>3"))) == ""


def test_without_collectives_replicas_need_no_order(tmp_path: Path) -> None:
    """The same order is legal where replicas have whole weights. The sum of a batch has its place among what they meet
    in: here new weights are gathered in the update."""
    whole = planned(tmp_path, zero=1)
    batch = "0F5@1 0SF5>3 0RB5<3 0B5@1 0D5 0F7@1 0SF7>3 0RB7<3 0B7@1 0D7 0AR1 0U1@2"
    assert meeting_ranks(whole).keys() == {(rank, rank // 2, "U") for rank in range(4)}
    assert said(with_batch(whole, 1, batch)) == ""
    assert "sum in different orders" not in said(with_batch(whole, 1, batch.replace("0AR1 0U1@2", "0U1@2 0AR1")))
    assert "ranks 0, 1 meet in different orders" in said(with_batch(whole, 1, batch.replace("0AR1 0U1", "0U1 0AR1")))
