"""Tests of the output of ranks and of the load of their stages: the rank stands before each line, and shares are those
of the clock."""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch.logs import Follower, chosen_ranks, log_ranks_problems, tail
from penstock.runtime.telemetry.utilisation import WINDOW_SECONDS, Utilisation
from penstock.support.errors import UsageError

from .two_ranks import finish, start


def test_which_ranks():
    assert chosen_ranks("all", 3) == {0, 1, 2}
    assert chosen_ranks("none", 3) == frozenset()
    assert chosen_ranks("2,0", 3) == {0, 2}
    for wrong in ("", "x", "-1", "0,", "0-2", "1.5", "²", "9" * 40, "All"):
        assert len(log_ranks_problems(wrong)) == 1
        with pytest.raises(UsageError, match="--log-ranks must be"):
            chosen_ranks(wrong, 3)
    with pytest.raises(UsageError, match="the bundle has ranks 0 to 2"):
        chosen_ranks("0,3", 3)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=40)), max_size=12))
def test_every_line_is_shown_once_with_its_rank(written):
    """However it is cut into writes, also what has no end of line, and what is no text."""
    files = {rank: tempfile.TemporaryFile() for rank in range(3)}  # noqa: SIM115 closed below
    error, sys.stderr = sys.stderr, io.StringIO()
    try:
        follower = Follower(files, {0: [0], 1: [1], 2: [1, 3]}, {0, 2})
        for rank, data in written:
            os.write(files[rank].fileno(), data)
        follower.close()
        follower.close()
        said = sys.stderr.getvalue()
    finally:
        sys.stderr = error
    for rank, stages in ((0, "stage 0"), (1, "stage 1"), (2, "stages 1 3")):
        whole = b"".join(data for of, data in written if of == rank)
        lines = whole.split(b"\n")
        lines = lines[:-1] if not lines[-1] else lines
        expected = [f"[rank {rank}, {stages}] {line.decode('utf-8', 'replace').rstrip()}" for line in lines]
        assert [line for line in said.split("\n") if line.startswith(f"[rank {rank}, ")] == (
            [] if rank == 1 else expected
        )
        if whole.strip(b"\n") and b"\r" not in whole:
            assert tail(files[rank]).split("\n")[-1].startswith("  | ")
    for file in files.values():
        file.close()


# ------------------------------------------------------------------------------------------------ how busy


def test_shares_are_of_the_last_seconds():
    """Two stages, the second one on two ranks. Against shares worked out by hand."""
    now, busy = [0.0], [0.0, 0.0, 0.0]
    found = Utilisation([0, 1, 1], lambda: busy, lambda: now[0])
    assert found.text() == ""
    for _ in range(20):
        now[0] += 1
        busy[:] = [busy[0] + 0.5, busy[1] + 0.25, busy[2] + 0.75]
        shares = found.look()
    assert shares == pytest.approx([0.5, 0.5])
    for i in range(1, 11):
        now[0] += 1
        busy[0] += 1
        shares = found.look()
        # What lies before the window does not count any more.
        recent = min(i, WINDOW_SECONDS)
        assert shares == pytest.approx(
            [
                (recent + 0.5 * (WINDOW_SECONDS - recent)) / WINDOW_SECONDS,
                0.5 * (WINDOW_SECONDS - recent) / WINDOW_SECONDS,
            ]
        )
    assert found.text().startswith("busy 1")
    assert re.fullmatch(r"busy \d+% \d+%", found.text()) or found.text() == ""


def test_what_cannot_be_known():
    """No answer yet; a computation that took longer than the window; many stages."""
    now = [0.0]
    assert Utilisation([0, 1], list, lambda: now[0]).text() == ""
    busy = [0.0]
    found = Utilisation([0], lambda: busy, lambda: now[0])
    found.look()
    now[0], busy[0] = 1.0, 30.0
    assert found.text() == "busy 100%"
    many = [0.0] * 9
    found = Utilisation(range(9), lambda: many, lambda: now[0])
    found.look()
    now[0] += 10
    many[3] = 5.0
    assert found.text() == "busy 0% to 50%"


# ------------------------------------------------------------------------------------------------ runs

NOISY = """
import os, sys
if "penstock.runtime.launch.forkserver" in sys.orig_argv or "penstock.support.processes" in sys.orig_argv:
    print("a library speaks", file=sys.stderr, flush=True)
    os.write(1, b"and says more")
"""


@pytest.fixture
def noisy(tmp_path, monkeypatch):
    """Every process of a rank writes when it starts, as libraries do."""
    folder = tmp_path / "noisy"
    folder.mkdir()
    (folder / "usercustomize.py").write_text(NOISY)
    (folder / "sitecustomize.py").write_text(NOISY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_a_local_run_shows_chosen_ranks_and_utilisation(bundle_of, noisy, capfd):
    path = bundle_of(2, "1f1b", 2).path
    run_bundle(path, steps=3, log_ranks="1")
    said = capfd.readouterr().err
    for line in ("a library speaks", "and says more"):
        assert f"[rank 1, stage 1] {line}\n" in said
    assert "[rank 0" not in said
    assert re.search(r"step 3/3  loss \S+  \S+ samples/s  busy \d+% \d+%  0s left", said)
    with pytest.raises(UsageError, match="the bundle has ranks 0 to 1"):
        run_bundle(path, steps=3, log_ranks="0,2")
    with pytest.raises(UsageError, match="--log-ranks must be"):
        run_bundle(path, steps=3, log_ranks="some")


@pytest.mark.slow
def test_a_group_shows_chosen_ranks(bundle_of, noisy, tmp_path):
    """Rank 0 speaks for the run: its words have no prefix."""
    both = start(bundle_of(2, "1f1b", 2).path, tmp_path, 6000, more=("--log-ranks", "1"))
    said = finish(both)
    assert [process.returncode for process in both] == [0, 0], said
    for line in ("a library speaks", "and says more"):
        assert f"[rank 1, stage 1] {line}\n" in said[1]
    assert "[rank" not in said[0]
    assert "a library speaks" in said[0]
    assert re.search(r"step 6000/6000  loss \S+  \S+ samples/s  busy \d+% \d+%  0s left", said[0])
