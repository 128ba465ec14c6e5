"""The parity report: its numbers against runs of the recurrence in the interpreter, the command, and the benchmark's data."""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from oracles.repository import BENCHMARKS

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.models import write_mlp
from penstock.support.errors import UsageError
from penstock.verification.parity import (
    DELAYED,
    PLAIN,
    Parity,
    ParitySetting,
    compare,
    final_loss,
    optimizers_of,
    report,
    spread,
)

BENCHMARK = BENCHMARKS / "parity.py"


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return write_mlp(tmp_path / "mlp.onnx", (6, 12, 3), 4, seed=2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=np.tanh(x @ rng.standard_normal((6, 3))).astype(np.float32))
    return tmp_path / "data.npz"


@pytest.mark.slow
def test_gaps_are_those_of_the_recurrence(mlp: Path, data: Path) -> None:
    """The final losses of real stages are what the interpreter finds with a delay of 0 and of 1, on the samples of each seed."""
    from penstock.runtime.data.samples import open_data
    from penstock.runtime.messages.control import DataSpec

    model = ps.from_onnx(mlp)
    setting = ParitySetting("mse", str(data), steps=12, microbatches=2, backend="numpy")
    (row,) = compare(lambda seed: model, optimizers_of("momentum:0.05"), setting, (0, 3))
    plan = ps.plan(model, ps.Cluster.local(1), ps.Training("mse", ps.Momentum(lr=0.05), 2))
    for i, seed in enumerate((0, 3)):
        samples = open_data(plan.module, DataSpec(str(data), True, seed), ("x", "labels"))
        batches = [
            {name: np.concatenate([samples.microbatch(2 * t + k, name) for k in range(2)]) for name in ("x", "labels")}
            for t in range(12)
        ]
        for delay, found in ((0, row.plain[i]), (1, row.delayed[i])):
            losses = run_recurrence(plan.reference, model.imported.weights, batches, delay=delay).losses
            steps = [statistics.fmean(losses[2 * t : 2 * t + 2]) for t in range(12)]
            assert found == pytest.approx(final_loss(steps), rel=1e-4)
    assert row.plain[0] != row.plain[1], "seeds see other orders of samples"
    assert all(abs(gap) > 1e-4 for gap in row.gaps), "control: the delay is there"


def test_numbers_of_a_row() -> None:
    row = Parity("adamw", (1.0, 2.0, 3.0), (1.1, 2.3, 3.2))
    assert row.gaps == pytest.approx((0.1, 0.3, 0.2))
    assert row.gap == pytest.approx(0.2)
    assert row.deviation == pytest.approx(0.1)
    assert report([row]) == [["adamw", "2.0000", "2.2000", "+0.1000 +0.3000 +0.2000", "+0.2000", "0.1000", "1.0000"]]
    assert math.isnan(spread([1.0]))
    assert math.isnan(spread([1.0, math.nan]))
    assert report([Parity("one", (1.0,), (math.nan,))]) == [["one", "1.0000", "nan", "+nan", "+nan", "-", "-"]]
    assert final_loss([9.0, *([0.0] * 18), 2.0]) == 1.0
    assert final_loss([3.0]) == 3.0


def test_optimizers_by_their_words() -> None:
    assert optimizers_of("momentum:0.5, adamw") == {"momentum:0.5": ps.Momentum(lr=0.5), "adamw": ps.AdamW()}
    assert list(optimizers_of("adamw{lr=1e-3,eps=1e-6},sgd").values()) == [ps.AdamW(lr=1e-3, eps=1e-6), ps.SGD()]
    for words, said in (
        ("adamx", "must be one of"),
        ("adamw:x", "bad learning rate 'x'"),
        ("adamw:-1", "0 or more"),
        (",", "names no optimiser"),
    ):
        with pytest.raises(UsageError, match=said):
            optimizers_of(words)
    with pytest.raises(UsageError, match="no pipeline to compare"):
        ParitySetting("mse", devices=1)


def test_the_command(mlp: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--loss",
        "mse",
        "--data",
        str(data),
        "--steps",
        "4",
        "--seeds",
        "1",
        "--optimizers",
        "sgd:0.1",
        "--microbatches",
        "2",
    ]
    assert main(["verify", str(mlp), "--parity", *flags, "--backend", "numpy"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"final loss, {PLAIN} .*final loss, {DELAYED}", out)
    assert re.search(r"sgd:0\.1 +\d\.\d{4} +\d\.\d{4} +[+-]\d\.\d{4} +[+-]\d\.\d{4} +- +-", out)
    assert "4 steps of 2 microbatches on 2 stages" in out


def test_flags_that_do_not_go_together(mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (["--seeds", "2"], "--seeds without --parity"),
        (["--parity"], "needs a loss"),
        (["--parity", "--loss", "mse", "--seed", "0"], "--seed with --parity"),
        (["--parity", "--loss", "mse", "--seed", "1", "--tolerance", "1e-3"], "--seed, --tolerance with --parity"),
        (["--parity", "--loss", "mse", "--devices", "1"], "no pipeline to compare"),
    ):
        assert main(["verify", str(mlp), *flags]) == 2
        assert said in capsys.readouterr().err
    assert main(["verify", str(tmp_path), "--parity", "--loss", "mse"]) == 2
    assert "not a bundle" in capsys.readouterr().err


def test_the_text_of_the_benchmark(tmp_path: Path) -> None:
    """What comes next is what is asked for, and every sample is of the text."""
    spec = importlib.util.spec_from_file_location("parity_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    count = benchmark.write_samples(tmp_path / "text.npz")
    text = benchmark.PROSE.read_text(encoding="ascii")
    letters = sorted(set(text))
    assert count == len(letters) < 100
    with np.load(tmp_path / "text.npz") as arrays:
        tokens, labels = arrays["tokens"], arrays["labels"]
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
    assert len(tokens) > 1000
    for row in (tokens[0], tokens[-1], labels[len(labels) // 2]):
        assert "".join(letters[i] for i in row) in text
