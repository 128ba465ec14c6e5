"""Edges and sums by NCCL keep its rules: over NCCL of paper, which has them and moves bytes by gloo (paper_nccl.py).

Every rule has a control that breaks it. A rank whose device waits for a lost peer ends with the usual words, though its
own thread waits for the device."""

from __future__ import annotations

import socket

import pytest
import torch

from penstock.runtime.group.group import gpu_of, library_of
from penstock.support.errors import UsageError

from . import device_peers
from .pairs import FORKS, pair_of

FORKS.set_forkserver_preload([device_peers.__name__])


@pytest.fixture
def talk(tmp_path):
    """talk(scenario) runs it (pairs.py)."""
    return pair_of(device_peers, tmp_path)


@pytest.mark.parametrize("scenario", ["exchange", "sums", "off"])
def test_messages_and_sums_keep_the_rules(scenario, talk):
    codes, said, _ = talk(scenario)
    assert codes == [0, 0], said


@pytest.mark.parametrize(
    ("scenario", "rank", "message"),
    [
        ("swapped", 1, "the ends issue in another order"),
        ("crossed", 0, "the ends issue in another order"),
        ("missing", 0, "ranks 0, 1, which exchange messages SB, did not connect within 20 s"),
        ("crowded", 0, "two ranks of a communicator have one GPU"),
        ("in_memory", 0, "NCCL takes tensors of GPUs alone"),
    ],
)
def test_a_broken_rule_is_caught(scenario, rank, message, talk):
    codes, said, _ = talk(scenario)
    assert codes[rank] == 6, said
    assert message in said[rank]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (
            "gone",
            "rank 0, stage 0, action 0RB5<1: rank 1 (stage 1) closed the connection",
        ),
        (
            "silent",
            "rank 1 (stage 1) did not answer within 1 s; waited for 0RB5<1 (receive of the gradient of microbatch 5 from rank 1)",
        ),
        (
            "silent_sum",
            "rank 1 (stage 0) did not answer within 1 s; waited for the sum of the gradients of batch 7",
        ),
    ],
)
def test_a_lost_peer_ends_a_rank_whose_device_waits(scenario, message, talk):
    codes, said, took = talk(scenario)
    assert codes[0] == 6, said
    assert message in said[0]
    assert took < 20


def test_gpus_are_offered_to_nccl_unless_it_is_switched_off(monkeypatch):
    assert gpu_of(torch.device("cpu"), {}) == ""
    with pytest.raises(UsageError, match="PENSTOCK_NCCL must be 0 or 1, got 'no'"):
        gpu_of(torch.device("cpu"), {"PENSTOCK_NCCL": "no"})
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    properties = type("Properties", (), {"uuid": "5a1c"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert gpu_of(torch.device("cuda", 0), {}) == "5a1c"
    # Two containers that share a GPU are two hosts by name: NCCL must not take it for two.
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert library_of([gpu_of(torch.device("cuda", 0), {}), "5a1c"]) == "gloo"
    assert library_of([gpu_of(torch.device("cuda", 0), {}), "5a1d"]) == "nccl"
    assert gpu_of(torch.device("cuda", 0), {"PENSTOCK_NCCL": "0"}) == ""
