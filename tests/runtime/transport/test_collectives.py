"""Tests of collectives between real processes: results are those of the interpreter to the bit, bytes are those of the
static count, and errors say who stands where."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from penstock.runtime.group.group import host_store

from . import members

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([members.__name__])


@pytest.fixture
def meet(tmp_path):
    """meet(scenario, ranks, ...) runs it; per rank the exit code and what it said, and the time it took."""

    def run(scenario, ranks, *arguments, seconds=60):
        store = host_store(ranks, 30)
        logs = [tmp_path / f"rank{rank}" for rank in range(ranks)]
        started = time.monotonic()
        processes = [
            FORKS.Process(target=members.speak, args=(scenario, rank, ranks, store.port, str(logs[rank]), arguments))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, seconds - (time.monotonic() - started)))
            took = time.monotonic() - started
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [process.exitcode for process in processes], [log.read_text() for log in logs], took

    return run


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("members", [2, 3])
def test_each_rank_keeps_its_parts_of_sums(members, near, meet):
    codes, said, _ = meet("keep_parts", members, members, near)
    assert codes == [0] * members, said


def test_control_the_parts_of_another_rank_are_no_sums(meet):
    codes, said, _ = meet("keep_parts", 2, 2, True, 1)
    assert codes == [1, 1], said
    assert all("AssertionError" in text for text in said)


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize(
    "axes",
    [(("tp", 2),), (("tp", 3),), (("dp", 2), ("tp", 2))],
    ids=["tp=2", "tp=3", "dp=2,tp=2"],
)
def test_results_are_those_of_the_interpreter_to_the_bit(axes, near, meet):
    ranks = 1
    for _, size in axes:
        ranks *= size
    codes, said, _ = meet("every_kind", ranks, axes, near)
    assert codes == [0] * ranks, said


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
def test_a_rank_that_does_not_come_is_named_with_its_place(near, meet):
    codes, said, _ = meet("late", 2, near)
    assert codes[0] == 6, said
    text = said[0]
    assert "rank 1 (stage 0) did not answer within 1 s" in text
    assert "rank 0 in 0F3, %y = all_reduce(%p, over=tp), waits for rank 1" in text
    assert ("waits for rank 1, which is in 0B1" in text) == near


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
def test_a_rank_that_ends_is_noticed_at_once(near, meet):
    codes, said, took = meet("killed", 2, near)
    assert codes == [6, 9], said
    assert took < 30
    assert "rank 1 (stage 0) closed the connection" in said[0]
    assert "%y = all_reduce(%p, over=tp) of 0F3" in said[0]


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gloo"])
def test_programs_that_disagree_never_add_up(near, meet):
    codes, said, _ = meet("elsewhere", 2, near)
    assert codes == [5, 5], said
    assert (
        "rank 0 in 0F3, %y = all_reduce(%p, over=tp), waits for rank 1, which is in 0B1, %z = all_reduce(%q, over=tp)"
        in said[0]
    )
    assert (
        "rank 1 in 0B1, %z = all_reduce(%q, over=tp), waits for rank 0, which is in 0F3, %y = all_reduce(%p, over=tp)"
        in said[1]
    )


@pytest.mark.parametrize("axes", [(("tp", 2),), (("dp", 2), ("tp", 2))], ids=["tp=2", "dp=2,tp=2"])
def test_a_library_gets_even_parts_side_by_side(axes, meet):
    ranks = 2 ** len(axes)
    codes, said, _ = meet("by_library", ranks, axes)
    assert codes == [0] * ranks, said
