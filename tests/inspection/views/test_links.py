"""`inspect --links`: a row for every channel, with the carrier of its devices and the seconds of the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.classifier import classifier

from penstock.inspection.views.links import show_links
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.support.errors import UsageError


def cells(text: str) -> list[list[str]]:
    """The rows of the table, without its head."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()[2:]]


def test_every_channel_has_a_row() -> None:
    module = classifier(3, "1f1b", 4)
    devices = (
        Device("cpu:0", host="a"),
        Device("cpu:1", "cuda", host="a", target="sm_90"),
        Device("cpu:2", "cuda", host="b", target="sm_90"),
    )
    rows = cells(show_links(module.but(cluster=Cluster(devices))))
    assert [row[:4] for row in rows] == [
        ["0 > 1", "cpu:0 > cpu:1", "F", "pinned"],
        ["1 > 0", "cpu:1 > cpu:0", "B", "pinned"],
        ["1 > 2", "cpu:1 > cpu:2", "F", "nccl"],
        ["2 > 1", "cpu:2 > cpu:1", "B", "nccl"],
    ]
    # A value of 4 x 8 float32.
    assert {row[6] for row in rows} == {"128 B"}
    # The control: on one host without GPUs nothing is sent by a library.
    near = Cluster(tuple(replace(d, kind="cpu", host="a", target="native") for d in devices))
    assert {row[3] for row in cells(show_links(module.but(cluster=near)))} == {"memory"}
    with pytest.raises(UsageError, match="has no schedule"):
        show_links(module.but(cluster=None))
