"""Inputs that are split over devices: every feed gives a rank its slices of the microbatches that its team runs.

The oracle cuts by NumPy's own indices; the control is an input without axes, which every rank gets whole.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ir.graph import Mesh, Module, Stage, Value
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.types import parse_type
from penstock.runtime.messages.control import Batch, RequestBatch
from penstock.runtime.messages.status import Status
from penstock.runtime.worker.evaluation import PortionFeed, portions
from penstock.runtime.worker.feeds import DataFeed, InputCuts, LocalSamples, Prefetch
from penstock.runtime.worker.message_feeds import BatchFeed, RequestFeed

WIDTH, ROWS, SHARES = 5, 2, ((0, 2), (1, 3))


def module_with(layout):
    """Return a module on a mesh of two teams of two, whose input `x` lies so, with `labels` that are whole."""
    inputs = Value("x", parse_type(layout)), Value("labels", parse_type(f"i64[{ROWS}]"))
    programs = {rank: Program((), tuple(Action("F", 0, mb) for mb in SHARES[rank // 2])) for rank in range(4)}
    mesh = Mesh("m", (("dp", 2), ("sp", 2)), ("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
    return Module("m", inputs, meshes=(mesh,), stages=(Stage(0, "m"),), schedule=Schedule("gpipe", 4, programs))


def columns(array, rank):
    """Return the columns of a rank, by hand: three, and two with a column of zeros."""
    return array[:, :3] if rank % 2 == 0 else np.concatenate([array[:, 3:], np.zeros((len(array), 1))], 1)


class Numbers:
    """Samples that say their place."""

    def microbatch(self, mb, name):
        return self.take(np.arange(mb * ROWS, mb * ROWS + ROWS), name)

    def take(self, places, name):
        return places if name == "labels" else places[:, None] * 10.0 + np.arange(1, WIDTH + 1)


def feeds_of(module, rank):
    """Return every kind of feed, with the microbatches to ask it for."""
    cuts, samples = InputCuts(module, rank), Numbers()
    local, share = LocalSamples(samples, cuts), SHARES[rank // 2]
    batch = {n: np.concatenate([samples.microbatch(mb, n) for mb in share]) for n in ("x", "labels")}
    messages = iter([(Batch(0), batch)])
    requests = iter([(RequestBatch(mb), {n: samples.microbatch(mb, n) for n in ("x", "labels")}) for mb in range(4)])
    sent = BatchFeed(module, rank, 0, lambda wait: next(messages))
    asked = RequestFeed(0, lambda wait: next(requests), Status(None, rank), {"": cuts})
    asked.wait(3)
    sent.wait(0)
    portion = PortionFeed(samples, portions(4 * ROWS, ROWS), ROWS, cuts)
    ahead = Prefetch(local, 0, 1, names=("x", "labels"), share=share, microbatches=4)
    return {"data": DataFeed(local, 0, 1), "ahead": ahead, "sent": sent, "asked": asked, "portion": portion}


@pytest.mark.parametrize("layout", [f"f32[{ROWS},{WIDTH}/sp]", f"f32[{ROWS},{WIDTH}]"])
def test_every_feed_cuts_for_its_rank(layout):
    module, seen = module_with(layout), {}
    for rank in range(4):
        for kind, feed in feeds_of(module, rank).items():
            for mb in SHARES[rank // 2]:
                whole = Numbers().microbatch(mb, "x")
                expected = columns(whole, rank) if "sp" in layout else whole
                np.testing.assert_array_equal(feed.microbatch(mb, "x"), expected, err_msg=kind)
                labels = feed.microbatch(mb, "labels")
                np.testing.assert_array_equal(labels, [mb * ROWS, mb * ROWS + 1], err_msg=kind)
                seen.setdefault((rank // 2, mb), []).append(rank)
            if kind == "ahead":
                feed.close()
    # Both ranks of a team, and no other, have a microbatch.
    assert {key: set(ranks) for key, ranks in seen.items()} == {
        (team, mb): {2 * team, 2 * team + 1} for team in (0, 1) for mb in SHARES[team]
    }
