"""Tests of channels between two real processes: messages keep their order, every wait has a deadline, and failures name
the rank that waited and its peer."""

from __future__ import annotations

import errno
import os

import pytest

from penstock.ir.graph import Edge, Value
from penstock.ir.schedule import Action
from penstock.ir.types import parse_type
from penstock.runtime.group.neighbours import identity
from penstock.runtime.transport.transport import RankTransport
from penstock.support.errors import DoesNotFit, PeerLost, UsageError, VerifyError

from . import peers
from .pairs import FORKS, pair_of

FORKS.set_forkserver_preload([peers.__name__])


@pytest.fixture
def talk(tmp_path):
    """talk(scenario) runs it (pairs.py)."""
    return pair_of(peers, tmp_path)


@pytest.mark.parametrize(
    "scenario",
    ["exchange", "slow_exchange", "together", "raw_tags", "team", "shared_memory"],
)
def test_messages_arrive_where_they_belong(scenario, talk):
    codes, said, _ = talk(scenario)
    assert codes == [0, 0], said


def test_ranks_must_agree(talk):
    codes, said, _ = talk("agree")
    assert codes == [5, 5]
    for text in said:
        assert "the ranks do not have the same shape:" in text
        assert "rank 0: shape 0" in text
        assert "rank 1: shape 1" in text


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (
            "silent",
            "rank 1 (stage 1) did not answer within 1 s; waited for 0RB5<1 (receive of the gradient of microbatch 5 from rank 1)",
        ),
        (
            "deaf",
            "rank 1 (stage 1) did not answer within 1 s; waited for 0SF5>1 (send of microbatch 5 to rank 1), which carries %vf32 : f32[3,5]",
        ),
        ("gone", "rank 1 (stage 1) closed the connection"),
        (
            "shared_deaf",
            "rank 1 (stage 1) did not answer within 1 s; waited for 0SF5>1 (send of microbatch 5 to rank 1)",
        ),
        ("shared_gone", "rank 1 (stage 1) closed the connection"),
        ("shared_mixed_up", "rank 1 (stage 1) expects message 5 where 4 is sent"),
        ("absent", "waited up to 1 s for 'roll' of rank 1"),
    ],
)
def test_a_peer_that_does_not_answer(scenario, message, talk):
    codes, said, seconds = talk(scenario)
    assert codes[0] == 6
    assert f"PeerLost rank 0{', stage 0, action 0' if scenario != 'absent' else ''}" in said[0]
    assert message in said[0]
    assert seconds < 20


def test_words_that_say_nothing_of_shared_memory():
    assert identity(environment={"PENSTOCK_SHARED_MEMORY": "0"}) == ""
    assert identity(environment={}) == identity(environment={"PENSTOCK_SHARED_MEMORY": "1"}) != ""
    with pytest.raises(UsageError, match="PENSTOCK_SHARED_MEMORY must be 0 or 1, got 'no'"):
        identity(environment={"PENSTOCK_SHARED_MEMORY": "no"})


def test_an_error_of_this_process_is_not_the_peers():
    """And of many values a few are named."""
    edge = Edge(0, 1, "F", tuple(Value(f"v{i}", parse_type("f32[2]")) for i in range(9)))
    transport, action = RankTransport(0, (edge,), {0: 0, 1: 1}, 1), Action("SF", 0, 3, peer=1)
    own = transport._lost(action, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert isinstance(own, DoesNotFit)
    assert str(own).startswith(
        "rank 0, stage 0, action 0SF3>1: the system did not let 0SF3>1 (send of microbatch 3 to rank 1) be handed over: Too many open files"
    )
    peers = transport._lost(action, BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))
    assert isinstance(peers, PeerLost)
    assert "%v5 : f32[2] and 3 more values" in str(peers)
    assert "%v6" not in str(peers)


def test_an_action_without_an_edge():
    transport = RankTransport(0, (Edge(0, 1, "F", ()),), {0: 0, 1: 1}, 1)
    assert transport.edge_of(Action("RF", 1, 0, peer=0)).dst == 1
    with pytest.raises(VerifyError, match="no edge from stage 1 to stage 0 in phase F"):
        transport.edge_of(Action("RF", 0, 0, peer=1))
