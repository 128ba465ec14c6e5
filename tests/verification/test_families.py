"""`verify` never calls right what is wrong by a number, nor wrong what is right: over families of models and seeds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.verification import checks

from .families import FAMILIES, write_family
from .faults import FOUND, NONE, draw

SEEDS = range(5)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_models_that_are_right_do_not_fail(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With inputs that are drawn, and with those the model is for. test_one_number_is_another is the control."""
    for seed in SEEDS:
        path, data = write_family(family, seed, tmp_path)
        for more in (["--seed", str(seed)], ["--data", str(data)]):
            assert main(["verify", str(path), *more]) == 0, (seed, more, capsys.readouterr().out)
        assert main(["verify", str(path), "--bisect", "--repro", "none", "--backend", "numpy"]) == 0


@pytest.mark.slow
def test_one_number_is_another(tmp_path: Path) -> None:
    """Of fifty faults that have an effect all are found; faults.py says what an effect is."""
    faults = list(draw(50, 0, tmp_path))
    counts = Counter(fault.verdict for fault in faults)
    assert counts.pop(FOUND) == 50, "\n".join(map(str, faults))
    assert counts.keys() <= {NONE}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_training_does_not_fail_by_its_seed(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map that is applied eight times makes any difference large. The control is a recurrence that is a step late."""
    path, _ = write_family("iterated", seed, tmp_path)
    words = ["--loss", "mse", "--optimizer", "adamw", "--lr", "1e-2", "--microbatches", "2", "--backend", "numpy"]
    assert main(["compile", str(path), *words, "-o", str(tmp_path / "b")]) == 0
    for steps in ("6", "9"):
        assert main(["verify", str(tmp_path / "b"), "--steps", steps, "--seed", str(seed)]) == 0
    monkeypatch.setattr(checks, "delay_of", lambda module: 1)
    assert main(["verify", str(tmp_path / "b"), "--steps", "6", "--seed", str(seed)]) == 5
    assert "FAILED" in capsys.readouterr().out
