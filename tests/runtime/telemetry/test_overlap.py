"""The share of messages that is hidden, of traces whose shares are known."""

from __future__ import annotations

import pytest
from oracles.classifier import classifier

from penstock.ir.cluster.cluster import Cluster, Link
from penstock.runtime.telemetry.overlap import overlap_of

# 4x8 numbers of float32 travel each way: 128 bytes.
BYTES, TAKES = 128, 0.01


@pytest.fixture(scope="module")
def module():
    pipeline = classifier(2, "1f1b", 2)
    local = Cluster.local(2)
    return pipeline.but(cluster=Cluster(local.devices, (Link("cpu:0", "cpu:1", BYTES / TAKES, 0.0),)))


def test_waits_count_from_the_send_on(module):
    sender = [("0SF0>1", 1.0, 1.001), ("0SF1>1", 2.0, 2.001), ("0SF2>1", 3.0, 3.001), ("0SF3>1", 4.0, 4.001)]
    receiver = [
        ("1RF0<0", 0.5, 1.01),  # waits for the computation, then for the whole message
        ("1RF1<0", 2.004, 2.01),  # for the rest of it
        ("1RF2<0", 3.5, 3.5001),  # was there
        ("1RF3<0", 4.005, 4.0051),  # was there earlier than its link says
        ("1RF9<0", 9.0, 9.5),  # sent by nobody
    ]
    found = overlap_of([sender, receiver], module)
    assert found.messages == 4
    assert found.waited == pytest.approx(0.01 + 0.006)
    assert found.moving == pytest.approx(0.01 + 0.01 + TAKES + 0.0051)
    assert found.hidden == pytest.approx(1 - 0.016 / 0.0351)


def test_all_hidden_and_nothing_sent(module):
    found = overlap_of([[("0SF0>1", 1.0, 1.001)], [("1RF0<0", 2.0, 2.0001)]], module)
    assert (found.waited, found.hidden) == (0.0, 1.0)
    assert overlap_of([[], []], module).hidden is None
