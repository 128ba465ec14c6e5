"""Reading ahead: the same arrays, in bounds, of this rank's microbatches alone; errors arrive where they belong; batches of every kind from programs."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from oracles.classifier import ROWS, WIDTH, classifier, make_batches
from torch.utils.data import DataLoader, TensorDataset

from penstock.runtime.data.batches import BatchCuts, check_batch, take_batch
from penstock.runtime.job.job import open as open_job
from penstock.runtime.worker.feeds import DataFeed, Prefetch
from penstock.support.errors import UsageError

NAMES = ("x", "labels")


class Counting:
    """Samples that say who asked for what."""

    def __init__(self, fails=None):
        self.asked, self.fails, self.release = [], fails, threading.Event()

    def microbatch(self, mb, name):
        self.asked.append((mb, name, threading.current_thread().name))
        if mb == self.fails:
            raise UsageError(f"{name}: sample {mb} is bad", where="the file")
        return np.array([mb, NAMES.index(name)])


def settled(samples):
    """What was asked once nothing more is."""
    deadline, before = time.monotonic() + 10, -1
    while len(samples.asked) != before and time.monotonic() < deadline:
        before = len(samples.asked)
        time.sleep(0.05)
    return [mb for mb, name, _ in samples.asked if name == "x"]


@pytest.mark.parametrize(("share", "total"), [([0, 1, 2], 3), ([1], 3), ([0, 3], 4)])
def test_reading_ahead_gives_the_same_in_bounds_and_of_its_share_alone(share, total):
    samples, plain = Counting(), DataFeed(Counting(), 5, 4)
    feed = Prefetch(samples, 5, 4, names=NAMES, share=share, microbatches=total, ahead=2)
    mine = [t * total + i for t in range(5, 9) for i in share]
    try:
        assert settled(samples) == mine[:2]
        for place, mb in enumerate(mine):
            for name in NAMES:
                np.testing.assert_array_equal(feed.microbatch(mb, name), plain.microbatch(mb, name))
            if place < 3:
                assert settled(samples) == mine[: place + 2]
        assert [feed.exists(t) for t in (8, 9)] == [True, False]
        assert {thread for _, _, thread in samples.asked} == {"data"}
        # An input that is asked for twice is read again.
        np.testing.assert_array_equal(feed.microbatch(mine[0], "x"), [mine[0], 0])
    finally:
        feed.close()
    assert not feed._thread.is_alive()


def test_inputs_that_are_taken_later_do_not_hold_up_the_others():
    """Labels that only a backward reads are taken several microbatches after x."""
    feed = Prefetch(Counting(), 0, 10, names=NAMES, share=[0], microbatches=1, ahead=1)
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(
            [feed.microbatch(mb, "x")[0] for mb in range(10)] + [feed.microbatch(mb, "labels")[0] for mb in range(10)]
        ),
        daemon=True,
    )
    thread.start()
    thread.join(10)
    feed.close()
    assert found == [*range(10), *range(10)]


def test_an_error_comes_where_it_belongs_and_not_before():
    feed = Prefetch(Counting(fails=2), 0, 4, names=NAMES, share=[0], microbatches=1)
    assert [feed.microbatch(mb, "x")[0] for mb in range(2)] == [0, 1]
    for mb in (2, 3):
        with pytest.raises(UsageError, match="the file: x: sample 2 is bad"):
            feed.microbatch(mb, "x")
    feed.close()


def test_a_feed_that_is_closed_early_leaves_no_thread():
    feed = Prefetch(Counting(), 0, 10**9, names=NAMES, share=[0], microbatches=1)
    feed.microbatch(0, "x")
    feed.close()
    assert not feed._thread.is_alive()


# ------------------------------------------------------------------------------------------------ batches from programs


@pytest.fixture(scope="module")
def module():
    return classifier(2, "1f1b", 2)


@pytest.mark.parametrize(
    "form",
    [
        dict,
        lambda b: (b["x"], b["labels"]),
        lambda b: [torch.from_numpy(b["x"]), torch.from_numpy(b["labels"])],
        lambda b: {
            name: torch.from_numpy(array).requires_grad_(array.dtype == np.float32) for name, array in b.items()
        },
        lambda b: (b["x"].T.copy().T, torch.from_numpy(np.repeat(b["labels"], 2))[::2]),
    ],
)
def test_forms_of_a_batch(module, form):
    (batch,) = make_batches(1, 2)
    found = take_batch(module, form(batch), "batch")
    check_batch(module, found)
    for name, array in batch.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(3), "expected a dict of arrays by the names of inputs, or a tuple of arrays, got Tensor"),
        (7, "got int"),
        ((np.zeros(3),), "has 1 arrays, expected 2, in the order x, labels"),
        ((torch.zeros(2, 2).to_sparse(), np.zeros(2)), "x: is no array"),
        (([[1], [1, 2]], np.zeros(2)), "x: is no array"),
    ],
)
def test_what_is_no_batch(module, given, said):
    with pytest.raises(UsageError) as caught:
        check_batch(module, take_batch(module, given, "batch 3"))
    assert said in str(caught.value)
    assert "batch 3" in str(caught.value)


def test_shares_of_a_batch(module):
    cuts = BatchCuts(module)
    x = np.arange(3 * ROWS * WIDTH, dtype=np.float32).reshape(3 * ROWS, WIDTH)
    np.testing.assert_array_equal(cuts.share("x", x, [0, 2], 3), np.concatenate([x[:ROWS], x[2 * ROWS :]]))
    assert cuts.share("x", x, [0, 1, 2], 3) is x


def test_a_data_loader(bundle_of):
    batches = make_batches(4, 2)
    whole = {name: torch.from_numpy(np.concatenate([b[name] for b in batches])) for name in batches[0]}
    data = TensorDataset(whole["x"][:-1], whole["labels"][:-1])
    with open_job(bundle_of(2, "2bw", 2).path, timeout=20) as job:
        expected = list(job.run(batches[:3]))
    with open_job(bundle_of(2, "2bw", 2).path, timeout=20) as job:
        assert list(job.run(DataLoader(data, batch_size=2 * ROWS, drop_last=True))) == expected
        with pytest.raises(UsageError) as caught:
            list(job.run(DataLoader(data, batch_size=2 * ROWS)))
    for text in (
        "batch 6: does not fit",
        "x: shape is [7, 8], expected [8, 8]",
        "a batch has 8 samples",
        "drop_last=True",
    ):
        assert text in str(caught.value)
