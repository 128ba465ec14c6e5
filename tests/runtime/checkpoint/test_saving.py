"""Tests of saves: a save is whole or absent, whichever process dies at any time. Saves run in the background, one at a
time, and only the newest are kept."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from oracles.classifier import make_batches

from penstock.backends.bundle.tensor_file import write_tensors
from penstock.runtime.checkpoint import saving
from penstock.runtime.checkpoint.finding import choose, damage_of, decide_together, find_checkpoint
from penstock.runtime.checkpoint.format import FORMAT, Index, read_index, read_tensors
from penstock.runtime.checkpoint.stored_tiles import SavedFile
from penstock.runtime.group.group import RankGroup, host_store
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch.local import Workers
from penstock.runtime.launch.restarts import Beginning
from penstock.runtime.messages import status
from penstock.runtime.messages.control import Setup
from penstock.runtime.messages.status import Status
from penstock.runtime.telemetry.metrics import Metrics
from penstock.support.errors import PenstockError, UsageError, VerifyError

from ..job.held import below
from ..waiting import is_running, wait_until
from .savers import Ranks

TIMEOUT = 30


def write_one(directory, step, keep_last=None):
    """A checkpoint with one tensor that says its step."""
    work = saving.start_save(directory, step)
    digest, size = write_tensors(work / "rank0.safetensors", {"w": np.full(1000, step, np.float32)})
    files = {"rank0.safetensors": SavedFile(digest, size, step, {"w": "f32[1000]"})}
    return saving.finish_save(
        work, directory, Index(FORMAT, step, "m", "1f1b", 1, None, files, samples=step), keep_last
    )


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def names(directory):
    return sorted(p.name for p in directory.iterdir())


# ------------------------------------------------------------------------------------------------ files and directories


class Board(dict):
    """What ranks exchange, without a connection."""

    def check(self, keys):
        return all(key in self for key in keys)

    def set(self, key, value):
        self[key] = value.encode()

    def delete_key(self, key):
        return self.pop(key, None) is not None


@pytest.mark.parametrize("heard", [True, False])
def test_rank_0_waits_until_all_have_heard(bundle_of, tmp_path, monkeypatch, heard):
    """The store may live in its process. The control: a rank that says nothing keeps its thread, but nobody who asks whether the checkpoint is whole."""
    bundle, board = bundle_of(2, "1f1b", 2), Board()
    status = Status(None, 0)
    group = SimpleNamespace(world=2, store=None)
    saver = saving.Saver(
        bundle, 0, group, Setup(str(bundle.path), TIMEOUT), SimpleNamespace(variables={}, older=dict), status
    )
    monkeypatch.setattr(saving.Saver, "_exchange", board)
    writing = saving._Writing(3, tmp_path, 0, work=saving.start_save(tmp_path, 3))
    board |= {"s/part/1": b"{}", **({"s/heard/1": b""} if heard else {})}
    writing.thread = threading.Thread(target=saver._write, args=(writing, "s", [], None), daemon=True)
    writing.thread.start()
    writing.thread.join(5 if heard else 0.5)
    assert names(tmp_path) == ["latest", "step-000003"]
    assert writing.failure is None
    assert writing.thread.is_alive() is not heard
    assert not saver._is_needed(writing)
    board.set("s/heard/1", "")
    writing.thread.join(5)
    assert not writing.thread.is_alive()


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3):
        write_one(tmp_path, step)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002", "step-000003"]
    (tmp_path / "step-000002" / "index.json").unlink()
    write_one(tmp_path, 4, keep_last=2)
    # What is damaged does not count, and is left to be looked at.
    assert names(tmp_path) == ["latest", "step-000002", "step-000003", "step-000004"]
    # Somebody went back to step 2 and trained on: what is above is another run's.
    write_one(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["latest", "step-000002", "step-000003", "step-000004"]
    assert choose(tmp_path).place.name == "step-000003"


def test_what_dead_saves_left_is_cleared_away(tmp_path):
    place = write_one(tmp_path, 1)
    # Dead while writing; while the pointer was written; while an old one was removed; between the renames of a replacement.
    (tmp_path / ".step-000002.0a1b.tmp").mkdir()
    (tmp_path / ".step-000002.0a1b.tmp" / "rank0.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.0a1b.tmp").write_text("step-0")
    (tmp_path / ".step-000000.0a1b.gone").mkdir()
    place.rename(tmp_path / ".step-000001.0a1b.old")
    (tmp_path / ".step-notes").mkdir()
    chosen = choose(tmp_path)
    assert chosen.place.name == ".step-000001.0a1b.old"
    assert chosen.words == ["latest names step-000001, which is not there; going on from .step-000001.0a1b.old"]
    write_one(tmp_path, 2)
    assert names(tmp_path) == [".step-notes", "latest", "step-000001", "step-000002"]
    assert damage_of(place) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "index", "hash"])
def test_a_damaged_newest_one_is_passed_over_with_a_word(tmp_path, damage):
    for step in (1, 2, 3):
        newest = write_one(tmp_path, step)
    file = newest / {"index": "index.json", "hash": "index.sha256"}.get(damage, "rank0.safetensors")
    if damage == "truncate":
        os.truncate(file, 100)
    elif damage == "remove":
        file.unlink()
    else:
        flip(file)
    chosen = choose(tmp_path)
    assert chosen.place.name == "step-000002"
    (word,) = chosen.words
    assert word.startswith(
        f"checkpoint step-000003 is damaged ({'index.json' if damage in ('index', 'hash') else 'rank0.safetensors'}: "
    )
    assert word.endswith("); going on from step-000002")
    with pytest.raises(VerifyError, match="the checkpoint is damaged"):
        choose(newest)
    for step in (1, 2):
        flip(tmp_path / f"step-00000{step}" / "rank0.safetensors")
    with pytest.raises(VerifyError, match="no checkpoint is whole") as caught:
        choose(tmp_path)
    assert all(f"step-00000{step}" in str(caught.value) for step in (1, 2, 3))


def test_without_a_pointer_the_newest_counts(tmp_path):
    for step in (1, 2):
        write_one(tmp_path, step)
    (tmp_path / "latest").unlink()
    assert choose(tmp_path).place.name == "step-000002"
    (tmp_path / "latest").write_text("step-000001\n")
    assert choose(tmp_path).place.name == "step-000001"
    with pytest.raises(UsageError, match="there is no checkpoint"):
        choose(tmp_path / "step-0")


def test_all_ranks_go_on_from_what_rank_0_chose(tmp_path):
    for step in (1, 2):
        newest = write_one(tmp_path, step)
    flip(newest / "rank0.safetensors")
    for path, expected in ((tmp_path, "step-000001"), (newest, VerifyError)):
        store, found = host_store(2, TIMEOUT), {}

        def ask(rank, store=store, found=found, path=path):
            try:
                group = RankGroup(store.clone(), rank, 2, TIMEOUT)
                found[rank] = decide_together(
                    group, "place", lambda: Beginning(choose(path).place.name, None, False, []), Beginning
                ).resume
            except VerifyError as error:
                found[rank] = type(error)

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert found == {0: expected, 1: expected}


def killed_while_saving(directory, seconds):
    """A process that saves one step after the other from the newest on, killed some time after its first."""
    before = (directory / "latest").read_bytes()
    child = os.fork()
    if child == 0:
        try:
            first = read_index(find_checkpoint(directory)).step
            for step in range(first + 1, first + 10**6):
                write_one(directory, step, keep_last=2)
        finally:
            os._exit(1)
    deadline = time.monotonic() + TIMEOUT
    while (directory / "latest").read_bytes() == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("trials", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_a_folder_that_loads(tmp_path, trials):
    chance = random.Random(3)
    last = read_index(write_one(tmp_path, 1)).step
    for _ in range(trials):
        killed_while_saving(tmp_path, chance.uniform(0, 0.05))
        chosen = choose(tmp_path)
        index = read_index(chosen.place)
        assert index.step > last
        assert not any("damaged" in word for word in chosen.words)
        assert np.all(read_tensors(chosen.place, index, {"w"})["w"] == index.step)
        last = index.step
    write_one(tmp_path, last + 1, keep_last=1)
    left = {name for name in names(tmp_path) if name > "step-"}
    assert f"step-{last + 1:06}" in left
    assert not [name for name in names(tmp_path) if name.startswith(".")]


# ------------------------------------------------------------------------------------------------ in the background


@pytest.fixture
def ranks(bundle_of, tmp_path, monkeypatch):
    return Ranks(bundle_of(2, "1f1b", 2), tmp_path, monkeypatch)


def test_training_goes_on_while_a_copy_is_written(ranks):
    """What is saved is the state of the step, not what became of it; nothing is there before all of it is."""
    ranks.may_write.clear()
    assert ranks.together(lambda saver: saver.save(ranks.directory, 1, background=True)) == [None, None]
    for store in ranks.stores:
        for name in store.versioned:
            store.newest(name).fill_(2)
    assert [name for name in names(ranks.directory) if not name.startswith(".")] == []
    ranks.may_write.set()
    assert ranks.together(lambda saver: saver.finish()) == [None, None]
    place = ranks.directory / "step-000001"
    assert damage_of(place) == []
    assert np.all(read_tensors(place, read_index(place), {"w0", "w1"})["w1"] == 1)


def test_without_a_copy_the_file_would_have_what_comes_later(ranks, monkeypatch):
    """The control: a save in the background that copies nothing."""
    for saver in ranks.savers:
        parts = type(saver)._parts
        monkeypatch.setattr(
            saver, "_parts", lambda step, copied, saver=saver, parts=parts: parts(saver, step, copied=False)
        )
    ranks.may_write.clear()
    ranks.together(lambda saver: saver.save(ranks.directory, 1, background=True))
    for store in ranks.stores:
        for name in store.versioned:
            store.newest(name).fill_(2)
    ranks.may_write.set()
    ranks.together(lambda saver: saver.finish())
    place = ranks.directory / "step-000001"
    assert np.all(read_tensors(place, read_index(place), {"w1"})["w1"] == 2)


def test_one_save_at_a_time(ranks):
    """The next save waits for the one before, and says how long."""
    ranks.may_write.clear()
    ranks.together(lambda saver: saver.save(ranks.directory, 1, background=True))
    for store in ranks.stores:
        store.retire(1)
        store.start_update(2)
        store.finish_update(2)
    timer = threading.Timer(0.3, ranks.may_write.set)
    timer.start()
    waited = []
    assert ranks.together(lambda saver: waited.append(saver.save(ranks.directory, 2))) == [None, None]
    timer.join()
    assert min(waited) > 0.1
    assert names(ranks.directory) == ["latest", "step-000001", "step-000002"]


@pytest.mark.parametrize("forgets", [True, False])
def test_saves_leave_nothing_at_the_meeting_point(ranks, monkeypatch, forgets):
    """Rank 0 holds the store for as long as the run: what saves exchange must not pile up there. The control keeps it."""
    if not forgets:
        monkeypatch.setattr(saving.Saver, "_forget", lambda self, key: None)
    counts = []
    for _ in range(3):
        assert ranks.together(lambda saver: saver.save(ranks.directory, 1)) == [None, None]
        counts.append(ranks.meeting.num_keys())
    assert (counts[2] == counts[0]) is forgets


def test_an_error_of_a_writer_comes_out_once_and_nothing_is_left_half(ranks):
    ranks.together(lambda saver: saver.save(ranks.directory, 1))
    ranks.errors[1] = OSError(28, "No space left on device")
    ranks.together(lambda saver: saver.save(ranks.directory, 1, background=True))
    with pytest.raises(PenstockError, match=r"cannot write the checkpoint: .*No space left on device") as caught:
        ranks.savers[1].finish()
    assert str(ranks.directory) in caught.value.where
    ranks.savers[1].check()
    assert choose(ranks.directory).place.name == "step-000001"


def test_a_run_that_fails_waits_for_a_save_that_gets_on(ranks, monkeypatch):
    """Rank 0 until the checkpoint is there, the others until their parts are; nobody for one that stands still."""
    ranks.may_write.clear()
    ranks.together(lambda saver: saver.save(ranks.directory, 1, background=True))
    monkeypatch.setattr(status, "_SAVE_QUIET_SECONDS", 0.1)
    assert ranks.together(lambda saver: saver.settle()) == [None, None]
    assert not (ranks.directory / "step-000001").exists()
    monkeypatch.setattr(status, "_SAVE_QUIET_SECONDS", TIMEOUT)
    timer = threading.Timer(0.3, ranks.may_write.set)
    timer.start()
    assert ranks.together(lambda saver: saver.settle()) == [None, None]
    timer.join()
    assert damage_of(ranks.directory / "step-000001") == []


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def slowness(tmp_path_factory):
    """What processes import from this folder makes every flush take a tenth of a second longer."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "sitecustomize.py").write_text(
        "import os, time\nflush = os.fsync\ndef slowly(file):\n    time.sleep(0.1)\n    flush(file)\nos.fsync = slowly\n"
    )
    return folder


@pytest.fixture
def slow_disks(slowness, monkeypatch):
    """For processes that are started from now on; one server serves all tests with it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(slowness), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.mark.usefixtures("slow_disks")
def test_a_run_that_fails_leaves_the_checkpoint_that_it_was_writing(bundle_of, tmp_path):
    """A loss that is not finite comes with the next step, while a slow disk is still at it."""
    batches = make_batches(2, 2)
    arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    arrays["x"][len(arrays["x"]) // 2 :] = np.nan
    np.savez(tmp_path / "data.npz", **arrays)
    options = {
        "data": tmp_path / "data.npz",
        "checkpoint": tmp_path / "ckpt",
        "checkpoint_every": 1,
        "nan": "stop",
        "progress": False,
    }
    with pytest.raises(PenstockError, match=r"step 1 has a loss nan.*newest checkpoint .*step-000001"):
        run_bundle(bundle_of(2, "1f1b", 2).path, steps=2, **options)
    assert damage_of(tmp_path / "ckpt" / "step-000001") == []


def interrupted(bundle, folder, patch, moment):
    """What a run with a save after its first step says that gets an interrupt at a moment: the end of step 1, or that of `Job.save`."""
    own = getattr(Metrics, moment)

    def interrupt(record, *given):
        own(record, *given)
        if len(record.losses) == (2 if moment == "add" else 1):
            signal.raise_signal(signal.SIGINT)

    patch.setattr(Metrics, moment, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_bundle(bundle.path, steps=9, checkpoint=folder, checkpoint_every=1, timeout=TIMEOUT, progress=False)
    return caught.value.__notes__[-1]


@pytest.mark.usefixtures("slow_disks")
@pytest.mark.parametrize("moment", ["add", "tell_wait"])
def test_an_interrupted_run_leaves_the_checkpoint_that_it_was_writing(bundle_of, tmp_path, monkeypatch, capfd, moment):
    told = interrupted(bundle_of(2, "1f1b", 2), tmp_path / "ckpt", monkeypatch, moment)
    assert f"; the newest checkpoint is {tmp_path / 'ckpt' / 'step-000001'}\n" in told
    assert damage_of(tmp_path / "ckpt" / "step-000001") == []
    assert (
        capfd.readouterr().err.count("waits for the checkpoint that is being written; another interrupt ends that") == 1
    )


@pytest.mark.usefixtures("slow_disks")
def test_an_interrupted_run_says_which_checkpoint_it_did_not_finish(bundle_of, tmp_path, monkeypatch):
    """The control: nobody waits. And an interrupt of the wait ends it, and all processes with it."""
    bundle = bundle_of(2, "1f1b", 2)
    with monkeypatch.context() as patch:
        patch.setattr(status, "_SAVE_QUIET_SECONDS", -1)
        told = interrupted(bundle, tmp_path / "torn", patch, "add")
    assert "; nothing was saved yet; step-000001 was not finished" in told
    assert not (tmp_path / "torn" / "step-000001").exists()
    ids = []

    def interrupt_again(workers):
        ids.extend(workers.process_ids())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workers, "await_saves", interrupt_again)
        told = interrupted(bundle, tmp_path / "again", patch, "tell_wait")
    assert "; step-000001 was not finished" in told
    assert len(ids) == 2
    assert not any(map(is_running, ids))


def test_a_run_keeps_the_newest_and_changes_nothing(bundle_of, tmp_path):
    bundle = bundle_of(2, "2bw", 2)
    batches = make_batches(6, 2)
    with Job(bundle, timeout=TIMEOUT) as job:
        expected = list(job.run(batches))
    with Job(bundle, timeout=TIMEOUT) as job:
        losses = []
        for batch in batches:
            losses.append(job.step(batch))
            job.save(tmp_path, background=True, keep_last=2)
    assert losses == expected
    assert names(tmp_path) == ["latest", "step-000005", "step-000006"]
    # The newest is damaged: the one before is used, with a word.
    flip(tmp_path / "step-000006" / "rank1.safetensors")
    with Job(bundle, timeout=TIMEOUT, resume=tmp_path) as job:
        assert job.warnings[0].startswith("checkpoint step-000006 is damaged (rank1.safetensors: SHA-256 is ")
        assert job.steps_done == 5
        assert list(job.run(batches[5:])) == expected[5:]


@pytest.mark.parametrize("trials", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(bundle_of, tmp_path, trials):
    bundle = str(bundle_of(2, "2bw", 2).path)
    script = (
        "import sys; from penstock.runtime.job.run import run_bundle; "
        "run_bundle(sys.argv[1], steps=10**6, checkpoint=sys.argv[2], checkpoint_every=1, keep_last=2, timeout=30, progress=False)"
    )
    chance = random.Random(1)
    for trial in range(trials):
        folder = tmp_path / str(trial)
        process = subprocess.Popen([sys.executable, "-c", script, bundle, str(folder)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not (folder / "latest").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.5))
        ranks = below(process.pid)
        process.kill()
        process.wait()
        # A rank that is saving finishes that, which may be after its launcher was killed.
        assert wait_until(lambda ranks=ranks: not any(map(is_running, ranks)))
        place = choose(folder).place
        step = read_index(place).step
        whole = run_bundle(bundle, steps=step + 2, timeout=TIMEOUT, progress=False)
        resumed = run_bundle(bundle, steps=2, resume=folder, timeout=TIMEOUT, progress=False)
        assert resumed.losses == whole.losses[step:]
        shutil.rmtree(folder)
