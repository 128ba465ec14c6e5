"""Tests of claims on directories: one run at a time saves into a directory, a dead run loses its claim, and a replaced
run notices."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from oracles.classifier import make_batches

from penstock.runtime.checkpoint import lock as claims
from penstock.runtime.checkpoint import saving
from penstock.runtime.checkpoint.lock import FILE, Claims, Holder
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle
from penstock.support.errors import UsageError

HOLD = "import sys, time; from penstock.runtime.checkpoint.lock import Claims; Claims().hold(sys.argv[1]); print('held', flush=True); time.sleep(600)"


def holder(directory: Path) -> Holder:
    return msgspec.json.decode((directory / FILE).read_bytes(), type=Holder)


def test_a_second_one_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    """Under whatever path; the one that has it may ask again."""
    first, second = Claims(), Claims()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert first.hold(tmp_path / "a" / "ckpt") == first.hold(tmp_path / "link" / "ckpt") == []
    with pytest.raises(UsageError, match="is in use: a job of this process saves checkpoints there") as caught:
        second.hold(tmp_path / "link" / "ckpt")
    assert "another directory" in caught.value.hint
    first.close()
    assert not (tmp_path / "a").exists(), "what was made and is empty goes again"
    assert second.hold(tmp_path / "a" / "ckpt") == []
    saving.start_save(tmp_path / "a" / "ckpt", 1)
    second.close()
    assert [p.name[:5] for p in (tmp_path / "a" / "ckpt").iterdir()] == [".step"]


def test_what_a_killed_holder_leaves_stops_nobody(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        # The control: while it lives, even if it does nothing, it has it.
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(UsageError, match=f"process {process.pid} on"):
            Claims().hold(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert holder(tmp_path).process == process.pid
    own = Claims()
    own.hold(tmp_path)
    assert holder(tmp_path).process == os.getpid()
    own.close()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Claims:
    """A holder on another host, which touches its file often."""
    for name, seconds in (("_BEAT_SECONDS", 0.02), ("_LOOK_SECONDS", 0.05), ("_SILENT_SECONDS", 0.4)):
        monkeypatch.setattr(claims, name, seconds)
    found = Claims("name")
    with monkeypatch.context() as there:
        there.setattr(claims, "own_boot", lambda: "there")
        found.hold(tmp_path)
    return found


def still(found: Claims) -> None:
    """Its host went down, and the file server has kept its lock."""
    (claim,) = found._held.values()
    claim._end.set()
    claim._beat.join()


def test_who_touches_its_file_has_it_and_who_is_silent_is_replaced(tmp_path: Path, elsewhere: Claims) -> None:
    with pytest.raises(UsageError, match="is in use"):
        Claims().hold(tmp_path)
    still(elsewhere)
    own = Claims()
    own.hold(tmp_path)
    assert holder(tmp_path).boot == claims.own_boot()
    with pytest.raises(UsageError, match=rf"process {os.getpid()} on .* has taken it over"):
        elsewhere.hold(tmp_path)
    elsewhere.close()
    assert own.hold(tmp_path) == [], "what the one before gives up is not its own any more"
    own.close()
    assert not list(tmp_path.iterdir())


def test_one_of_several_that_wait_takes_it_over(tmp_path: Path, elsewhere: Claims) -> None:
    still(elsewhere)
    won: list[Claims] = []
    lost: list[UsageError] = []

    def take() -> None:
        own = Claims()
        try:
            own.hold(tmp_path)
        except UsageError as error:
            lost.append(error)
        else:
            won.append(own)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(won), len(lost)) == (1, 3)
    won[0].close()
    elsewhere.close()


def test_the_next_start_of_a_run_waits_for_the_one_before(
    tmp_path: Path, elsewhere: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another name does not."""
    timer = threading.Timer(0.5, elsewhere.close)
    timer.start()
    with pytest.raises(UsageError, match="is in use"):
        Claims("another").hold(tmp_path)
    again = Claims("name")
    again.hold(tmp_path)
    timer.join()
    monkeypatch.setattr(claims, "_HANDOVER_SECONDS", 0.2)
    with pytest.raises(UsageError, match="is in use"):
        Claims("name").hold(tmp_path)
    again.close()


def test_a_directory_that_was_cleared_is_claimed_again(tmp_path: Path) -> None:
    own = Claims()
    own.hold(tmp_path / "ckpt")
    (tmp_path / "ckpt" / FILE).unlink()
    (tmp_path / "ckpt").rmdir()
    assert own.hold(tmp_path / "ckpt") == []
    with pytest.raises(UsageError, match="is in use"):
        Claims().hold(tmp_path / "ckpt")
    own.close()


def test_a_claim_that_was_lost_stays_lost_while_another_has_it(tmp_path: Path) -> None:
    directory, own, other = tmp_path / "ckpt", Claims(), Claims()
    own.hold(directory)
    (directory / FILE).rename(tmp_path / "mine")
    other.hold(directory)
    taken = directory / FILE
    taken.rename(tmp_path / "other's")
    # The file is not there when the first looks, and the other's is when it takes one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "make_directories", lambda path: (tmp_path / "other's").rename(taken) and [])
        with pytest.raises(UsageError, match="is in use"):
            own.hold(directory)
    with pytest.raises(UsageError, match="is in use"):
        own.hold(directory)
    other.close()
    assert own.hold(directory) == []
    own.close()


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = Claims(), Claims()
    for own in (first, second):
        assert own.hold(tmp_path) == [
            f"{tmp_path}: its file system has no locks; make sure that no other run saves there"
        ]
        assert own.hold(tmp_path) == []
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ runs


def test_runs_do_not_save_into_one_directory(bundle_of, tmp_path: Path) -> None:
    """The second is refused before it starts anything or writes its metrics; the first goes on, and what it saves is whole."""
    bundle, (batch,) = bundle_of(1, "1f1b", 2), make_batches(1, 2)
    metrics = tmp_path / "m.jsonl"
    metrics.write_text('{"step": 0}\n')
    with Job(bundle, timeout=30) as job:
        job.step(batch)
        job.save(tmp_path / "ckpt")
        with pytest.raises(UsageError, match="is in use"):
            run_bundle(bundle.path, steps=1, checkpoint=tmp_path / "ckpt", metrics=metrics, progress=False)
        assert metrics.read_text() == '{"step": 0}\n'
        with Job(bundle, timeout=30) as other:
            other.step(batch)
            with pytest.raises(UsageError, match="is in use"):
                other.save(tmp_path / "ckpt")
            # It goes on all the same, and may save elsewhere.
            assert other.save(tmp_path / "other").exists()
        job.step(batch)
        job.save(tmp_path / "ckpt")
    found = run_bundle(bundle.path, steps=1, resume=tmp_path / "ckpt", checkpoint=tmp_path / "ckpt", progress=False)
    assert found.first_step == 2
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == [
        "latest",
        "step-000001",
        "step-000002",
        "step-000003",
    ]
