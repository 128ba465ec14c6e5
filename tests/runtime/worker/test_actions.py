"""The stream of actions equals `Schedule.expand`, whether the number of batches is known from the start or found out on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.classifier import ROWS, classifier

from penstock.ir.batch_shares import fed_inputs, loss_stage, microbatch_size
from penstock.ir.schedule import RECEIVES
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.runtime.worker.actions import ActionStream, retiring
from penstock.runtime.worker.feeds import DataFeed, NoSamples
from penstock.support.errors import VerifyError


class LateFeed:
    """Learns of a batch only when somebody waits for it."""

    def __init__(self, first: int, batches: int) -> None:
        self.known, self.end, self.waits = first, first + batches, 0

    def exists(self, batch):
        if batch < self.known:
            return True
        return False if self.known == self.end + 1 else None

    def wait(self, batch):
        self.waits += 1
        if self.known < self.end:
            self.known += 1
        else:
            # The end was announced: nothing past it is a batch.
            self.exists = lambda b: b < self.end

    def microbatch(self, mb, name):
        raise AssertionError

    def finish(self, batch):
        pass


KINDS = [kind for kind, row in SCHEDULES.items() if row.trains]


def versioned(kind, stages, m):
    try:
        return classifier(stages, kind, m).schedule
    except VerifyError:
        return None


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_stream_is_expand(kind, stages, m, first, batches, ahead):
    found = versioned(kind, stages, m)
    if found is None:
        return
    for rank in range(stages):
        expected = list(found.expand(rank, batches, first))
        for feed in (DataFeed(NoSamples(), first, batches), LateFeed(first, batches)):
            stream, seen = ActionStream(found, rank, first, feed), []
            while True:
                stream.receives(ahead)
                upcoming = stream.pop()
                if upcoming is None:
                    break
                seen.append(upcoming.action)
            assert seen == expected


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(KINDS),
    st.integers(2, 4),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_receives_are_told_of_when_they_come_into_sight(kind, stages, m, first, batches, ahead):
    """Each once, in order, never later than its turn; as soon as it is in sight where it is known how many batches there are."""
    found = versioned(kind, stages, m)
    if found is None:
        return
    for rank in range(stages):
        actions = list(found.expand(rank, batches, first))
        for feed, knows in ((DataFeed(NoSamples(), first, batches), True), (LateFeed(first, batches), False)):
            stream, told = ActionStream(found, rank, first, feed), []
            for done, action in enumerate(actions, 1):
                assert stream.pop().action == action
                told += stream.receives(ahead)
                due, sight = ([a for a in actions[:end] if a.kind in RECEIVES] for end in (done, done + ahead))
                assert told == sight if knows else told == sight[: len(told)] and len(told) >= len(due)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2))
def test_versions_are_retired_right_after_their_last_reader(kind, stages, m, first):
    found = versioned(kind, stages, m)
    if found is None:
        return
    batches = 5
    for rank in range(stages):
        stream, items = ActionStream(found, rank, first, DataFeed(NoSamples(), first, batches)), []
        while (upcoming := stream.pop()) is not None:
            items.append(upcoming)
        readers = [(i, a.version) for i, (a, _) in enumerate(items) if a.kind in "FBW"]
        retired = [(i, v) for i, (_, v) in enumerate(items) if v is not None]
        assert [v for _, v in retired] == sorted({v for _, v in retired})
        for i, version in retired:
            of_version = [j for j, v in readers if v == version]
            assert not of_version or i == max(of_version)
        # Whatever is left at the end is what the next run may read.
        delay = SCHEDULES[kind].delay
        assert retired[-1][1] == first + batches - 1 - delay


def test_retiring_without_versions(toy):
    unversioned = schedule(toy(2), ScheduleOptions(kind="1f1b", microbatches=2))
    assert retiring(unversioned.schedule.ranks[0]) == {}
    assert len(retiring(weight_versions(unversioned).schedule.ranks[0])) == 1


def test_what_a_module_says():
    module = classifier(3, "1f1b", 3)
    assert [fed_inputs(module, stage) for stage in range(3)] == [("x",), (), ("labels",)]
    assert loss_stage(module) == 2
    assert microbatch_size(module) == ROWS
    inference = classifier(2, "forward", 1)
    assert loss_stage(inference) is None
    assert [fed_inputs(inference, stage) for stage in range(2)] == [("x",), ()]
