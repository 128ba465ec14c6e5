"""Tests of malformed input: the command reports an error of Penstock with an exit code from 2 to 6, never a traceback.

The command line runs in this process, with nothing behind it: starting workers or becoming a rank means that the input was taken for good, which
counts as a failure. What only workers read is tried in real processes, a few cases of it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from acceptance.malformed import COUNT, cases
from acceptance.malformed_bundles import seal
from acceptance.malformed_case import FORGED, HOSTILE, Case, Good, obeyed

import penstock as ps
from penstock.commands.parser import main
from penstock.models import write_mlp
from penstock.runtime.job.run import run_bundle

CASES = cases()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good") / HOSTILE
    folder.mkdir()
    model = ps.from_onnx(write_mlp(folder / "mlp.onnx", [4, 8, 3], None, seed=1), dims={"batch": 2})
    bundles = {}
    for name, training in (("bundle", ps.Training("cross_entropy", ps.SGD(lr=0.1), 2)), ("forward", None)):
        plan = ps.plan(model, ps.Cluster.local(2), training, schedule="1f1b")
        bundles[name] = ps.compile(plan, folder / name, backend="numpy")
    np.savez(folder / "data.npz", x=np.zeros((8, 4), np.float32), labels=np.zeros(8, np.int64))
    run_bundle(
        bundles["bundle"],
        data=folder / "data.npz",
        steps=1,
        checkpoint=folder / "checkpoint",
        progress=False,
        timeout=20,
    )
    return Good(folder / "mlp.onnx", bundles["bundle"], bundles["forward"], folder / "data.npz", folder / "checkpoint")


SECONDS, GROWTH = 20, 2 << 30


class Accepted(BaseException):
    """The input went through."""


@pytest.fixture
def tried(good, tmp_path, monkeypatch, capfd):
    """tried(case): what is wrong with how the command ended; empty when nothing is."""

    def accept(*given, **named):
        raise Accepted

    def late(*given):
        raise AssertionError(f"took more than {SECONDS} s")

    for place in (
        "penstock.runtime.job.ranks.Workers",
        "penstock.runtime.launch.options.os.execve",
        "penstock.doctor.examine.measure",
    ):
        monkeypatch.setattr(place, accept, raising=False)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "PENSTOCK_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)

    def bounded():
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + GROWTH, before[1]))
        signal.alarm(SECONDS)

    def tried(case: Case) -> str:
        try:
            return ended(case)
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, before)

    def ended(case: Case) -> str:
        for name, text in case.environment.items():
            monkeypatch.setenv(name, text)
        # Every message that names a file has something to quote.
        folder = tmp_path / HOSTILE
        folder.mkdir(exist_ok=True)
        words = case.make(folder, good)
        capfd.readouterr()
        try:
            bounded()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = main(words)
        except Accepted:
            return "was accepted"
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"raised {type(error).__name__}: {str(error)[:300]}"
        heard = capfd.readouterr()
        said = heard.err
        if code not in range(2, 7):
            return f"ended with {code}: {said[-300:]}"
        if (
            "Traceback" in said
            or "internal error" in said
            or not any(line.startswith("penstock: error: ") for line in said.split("\n"))
        ):
            return f"said {said[:300]}"
        if found := obeyed(said + heard.out):
            return f"printed {found} in {said[:300]!r}"
        return "" if len(said) < 8000 else f"said {len(said)} characters"

    yield tried
    signal.signal(signal.SIGALRM, handler)


def test_there_are_as_many_as_promised():
    assert len(CASES) >= COUNT


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_malformed(case, tried):
    assert tried(case) == ""


def test_control_the_harness_sees_what_it_should(tried, monkeypatch):
    """A bug is seen, what is good is accepted, and other exit codes are none of ours."""
    assert (
        tried(Case("good", lambda folder, good: ["run", str(good.bundle), "--data", str(good.data)])) == "was accepted"
    )
    assert (
        tried(Case("resume", lambda folder, good: ["run", str(good.bundle), "--resume", str(good.checkpoint)]))
        == "was accepted"
    )
    assert tried(Case("inspect", lambda folder, good: ["inspect", str(good.bundle)])).startswith("ended with 0")

    def broken(*given):
        raise KeyError("a bug")

    monkeypatch.setattr("penstock.runtime.job.job.check_data", broken)
    assert tried(Case("bug", lambda folder, good: ["run", str(good.bundle), "--data", str(good.data)])) != ""


def test_control_what_steers_a_terminal_is_seen(tried, monkeypatch):
    assert [obeyed(text) for text in ("a\x1b[31mb", "a\rb", "a\u202eb")] == ["'\\x1b'", "'\\r'", "'\\u202e'"]
    assert (obeyed(f"a\n{FORGED}"), obeyed(f"a\n  {FORGED}")) == (FORGED, "")
    case = next(case for case in CASES if case.name == "hostile-model-operator")
    assert tried(case) == ""
    monkeypatch.setattr("penstock.support.errors.visible_lines", str)
    assert tried(case).startswith("printed '\\x1b'")


def test_errors_tell_no_secrets(good, tmp_path):
    """Neither the environment nor what key files and tensors hold is in a message or in what a failed worker says, and -v changes nothing of that."""
    secret, number = "tell-nobody-5b1d", 918273.5
    key = tmp_path / "key"
    key.write_text(secret)
    data = tmp_path / "d.npz"
    np.savez(data, x=np.full((8, 4), number, np.float32), labels=np.full(8, 7))
    cases = [
        (["sign", str(good.bundle), "--key", str(key)], {}),
        (["run", str(good.bundle), "--steps", "1"], {"PENSTOCK_BUNDLE_KEY": str(key)}),
        (["run", str(good.bundle), "--steps", "1", "--log", "prometheus:0"], {"PENSTOCK_METRICS_TOKEN": str(key)}),
        (["run", str(good.bundle), "--steps", "1", "--data", str(data), "-v"], {}),
    ]
    for words, environment in cases:
        code, said = _process(words, PENSTOCK_TEST_SECRET=secret, **environment)
        assert code != 0, said
        assert secret not in said
        assert str(number) not in said


def _process(words: list[str], **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | environment,
        check=False,
    )
    return done.returncode, done.stderr


def test_what_only_workers_read(good, tmp_path, capfd):
    """Weights that are no weights, and a label out of range, come from a worker as an error of ours."""
    import shutil

    bundle = tmp_path / "bundle"
    shutil.copytree(good.bundle, bundle)
    (bundle / "weights" / "s0.safetensors").write_bytes(b"\xff" * 40)
    seal(bundle)
    bad = tmp_path / "labels.npz"
    np.savez(bad, x=np.zeros((8, 4), np.float32), labels=np.full(8, 7))
    for words in (["run", str(bundle), "--steps", "1"], ["run", str(good.bundle), "--steps", "1", "--data", str(bad)]):
        capfd.readouterr()
        code = main(words)
        said = capfd.readouterr().err
        assert code in range(2, 7), said
        assert said.startswith("penstock: error: rank "), said
        assert "Traceback" not in said


def test_a_group_that_cannot_be(good):
    code, said = _process(["run", str(good.bundle)], RANK="abc", WORLD_SIZE="0", MASTER_PORT="x", MASTER_ADDR="")
    assert (code, "Traceback" in said) == (2, False), said


def test_nothing_is_left_in_the_way(good):
    """The good files are still good after all that."""
    assert Path(good.checkpoint / "latest").read_text().startswith("step-")
