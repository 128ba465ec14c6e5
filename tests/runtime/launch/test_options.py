"""Tests of options: those that must fail are refused before any process starts, and others end with an error of
Penstock."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from penstock.backends.bundle.format import open_bundle
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle
from penstock.runtime.launch.options import LONGEST_TIMEOUT
from penstock.runtime.launch.reports import Reports
from penstock.runtime.messages.control import DataSpec, Step
from penstock.runtime.telemetry.metrics import Metrics
from penstock.runtime.telemetry.trace import write_trace
from penstock.support.errors import PeerLost, PenstockError, UsageError
from penstock.support.paths import directory_problem, file_problem


@pytest.fixture
def refuse(bundle_of, monkeypatch):
    """refuse(text, **options): `run` refuses the options, saying so, and starts nothing."""
    monkeypatch.setattr("penstock.runtime.job.ranks.Workers", lambda *given: pytest.fail("started workers"))

    def refuse(text, **options):
        with pytest.raises(UsageError) as caught:
            run_bundle(bundle_of(2, "2bw", 4).path, **options)
        assert text in str(caught.value)

    return refuse


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -float("inf"), 0.0, -1.0, LONGEST_TIMEOUT * 2, 1e300])
def test_timeouts(refuse, bundle_of, timeout):
    refuse(f"the timeout must be more than 0 and at most 1000000 seconds, got {timeout:g}", timeout=timeout)
    with pytest.raises(UsageError, match="the timeout must be"):
        Job(bundle_of(2, "2bw", 4), timeout=timeout)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**26])
def test_seeds(refuse, bundle_of, seed):
    refuse(f"the seed must be 0 to 2^63-1, got {seed}", seed=seed)
    with pytest.raises(UsageError, match="the seed must be"):
        Job(bundle_of(2, "2bw", 4), data=DataSpec(seed=seed))


def test_the_largest_seed_and_a_group_that_has_no_time_to_meet(bundle_of):
    path = bundle_of(2, "2bw", 4).path
    assert len(run_bundle(path, steps=1, seed=2**63 - 1, timeout=20, progress=False).losses) == 1
    with pytest.raises(PeerLost) as caught:
        run_bundle(path, steps=1, timeout=1e-9, progress=False)
    assert "internal error" not in str(caught.value)


def test_numbers_of_steps(refuse, tmp_path):
    for steps in (0, 10**30):
        refuse(f"steps must be 1 to 1000000000000, got {steps}", steps=steps)
    refuse("--checkpoint-every must be", checkpoint=tmp_path, checkpoint_every=10**30)


def test_all_problems_are_one_error(refuse, tmp_path):
    with pytest.raises(AssertionError):
        refuse("no such text", steps=0)
    refuse(
        f"got 0; the timeout must be more than 0 and at most 1000000 seconds, got -1; --trace {tmp_path}",
        steps=0,
        timeout=-1,
        trace=tmp_path,
    )


@pytest.mark.parametrize("flag", ["metrics", "trace", "checkpoint"])
def test_places_that_cannot_be_written(refuse, tmp_path, flag):
    file = tmp_path / "file"
    file.write_text("kept")
    wrong = file if flag == "checkpoint" else tmp_path
    refuse(f"--{flag} {wrong}: ", **{flag: wrong})
    refuse(f"--{flag} {file}/deep/er: ", **{flag: file / "deep" / "er"})
    refuse(f"--{flag} /proc/x/y: cannot write into /proc: ", **{flag: "/proc/x/y"})
    long = tmp_path / ("n" * 300)
    refuse(f"--{flag} {long}: ", **{flag: long})
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        refuse("Permission denied", **{flag: tmp_path / "closed" / "x"})
    assert file.read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "closed") == ["file"]


def test_places_inside_each_other(refuse, tmp_path):
    place = tmp_path / "x"
    refuse(f"--metrics {place} cannot be a file and the place of --trace {place}", metrics=place, trace=place)
    refuse(f"--metrics {place} cannot be a file and the place of --checkpoint {place}", metrics=place, checkpoint=place)
    refuse(
        f"--trace {place} cannot be a file and the place of --checkpoint {place}/c", trace=place, checkpoint=place / "c"
    )


def test_places_that_can_be_written(tmp_path):
    for path in (tmp_path / "new", tmp_path / "a" / "b" / "c"):
        assert file_problem(str(path)) == directory_problem(str(path)) == ""
    assert directory_problem(str(tmp_path)) == ""
    old = tmp_path / "old"
    old.write_text("kept")
    assert file_problem(str(old)) == ""
    assert old.read_text() == "kept"
    # A pipe without a reader must not be waited for.
    os.mkfifo(tmp_path / "pipe")
    assert file_problem(str(tmp_path / "pipe")) == ""
    assert file_problem("/dev/null") == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "pipe"]


def test_names_that_are_no_utf8(refuse, bundle_of, tmp_path):
    """They cannot be told to ranks, nor be written into a checkpoint's index: said before any step."""
    odd = tmp_path / os.fsdecode(b"a\xff")
    for name in ("checkpoint", "resume", "data"):
        refuse(f"--{name} {tmp_path}/a\\udcff: its name is no UTF-8", **{name: odd})
    copy = tmp_path / os.fsdecode(b"b\xff")
    shutil.copytree(bundle_of(2, "2bw", 4).path, copy)
    with pytest.raises(UsageError, match="its name is no UTF-8"):
        Job(open_bundle(copy))
    with pytest.raises(UsageError, match="its name is no UTF-8"):
        run_bundle(copy)


def test_other_names_are_known_to_ranks(bundle_of, tmp_path):
    with Job(bundle_of(2, "2bw", 4), timeout=60) as job, pytest.raises(UsageError, match="its name is no UTF-8"):
        job.save(tmp_path / os.fsdecode(b"a\xff"))
    assert run_bundle(bundle_of(2, "2bw", 4).path, steps=1, checkpoint=tmp_path / "\u00e4", progress=False).checkpoint


def test_places_that_are_relative_to_where_we_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("new", "./new", "a/b/c"):
        assert file_problem(path) == directory_problem(path) == ""
    (tmp_path / "file").write_text("kept")
    assert file_problem("file/x") != ""
    assert directory_problem("file/x") != ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_disk_that_fills_up_later(tmp_path):
    metrics = Metrics("/dev/full", 4, 0, 2, progress=False)
    with pytest.raises(PenstockError, match=r"cannot write the metrics: .*No space left"):
        metrics.add(Step(0, 1.0, (1.0,), 0.1, 0.0))
    metrics.close()
    with pytest.raises(PenstockError, match="cannot write the metrics"):
        Metrics(tmp_path, 4, 0, 2)
    with pytest.raises(PenstockError, match="cannot write the trace"):
        write_trace(tmp_path, [])


def test_metrics_of_something_else_are_no_traceback(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'\xff\xfe\n{"step": 0}\n{"step": 3}\n')
    Metrics(path, 4, 2, 4, append=True).close()
    assert path.read_text() == '{"step": 0}\n'


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_loss_that_is_not_finite_is_warned_of_once(capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    metrics = Metrics(None, 4, 0, 5, progress=terminal)
    for step, loss in enumerate([1.0, 2.0, float("inf"), float("nan"), 1.0]):
        metrics.add(Step(step, loss, (loss,), 0.1, float(step)))
    metrics.close()
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "warning: the loss of step 2 is inf; the run goes on\n" in said
    assert metrics.losses[2] == float("inf")


def test_finite_losses_are_not_warned_of(capsys):
    metrics = Metrics(None, 4, 0, 1, progress=False)
    metrics.add(Step(0, 1e30, (1e30,), 0.1, 0.0))
    assert capsys.readouterr().err == ""


def test_metrics_that_fail_in_the_background_are_not_lost(monkeypatch, bundle_of):
    """Under torchrun, rank 0 takes the losses of another rank in a thread."""
    import penstock.runtime.launch.reports as reporting

    class Arrived:
        def wait(self, timeout):
            return True

    monkeypatch.setattr(reporting.dist, "irecv", lambda message, source, tag: message.zero_() is not None and Arrived())
    metrics = Metrics("/dev/full", 4, 0, 2, progress=False)
    reports = Reports(0, bundle_of(2, "1f1b", 1).module, {}, metrics)
    listener = reports.expect(1)
    listener.join(10)
    assert isinstance(reports.failure, PenstockError)
    metrics.close()


def test_nothing_is_written_into_the_bundle(refuse, bundle_of):
    """It would not be whole any more, and compiling it again would take what was written with it."""
    bundle = bundle_of(2, "2bw", 4).path
    for flag, path in (
        ("metrics", bundle / "m.jsonl"),
        ("trace", bundle / "t.json"),
        ("checkpoint", bundle / "ckpt"),
        ("checkpoint", bundle),
    ):
        refuse(f"--{flag} {path}: lies in the bundle", **{flag: path})
