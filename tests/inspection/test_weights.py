"""Statistics of weights, against NumPy in one piece and against exact sums."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.commands.parser import main
from penstock.inspection import weights
from penstock.inspection.subject import Subject
from penstock.inspection.weights import statistics

FLOATS = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf]))


@settings(deadline=None)
@given(
    arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=FLOATS),
    st.sampled_from([1, 3, 1 << 20]),
)
def test_statistics_are_those_of_the_whole_array(array: np.ndarray, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_PART", part)
        found = statistics(array)
    flat = array.reshape(-1).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    assert (found.count, found.zeros, found.nans) == (flat.size, int((flat == 0).sum()), int(np.isnan(flat).sum()))
    assert found.infinities == flat.size - finite.size - found.nans
    if not finite.size:
        assert found.least is None
        assert found.mean is None
        return
    assert (found.least, found.most) == (finite.min(), finite.max())
    scale = max(1.0, float(np.abs(finite).max()))
    assert found.mean == pytest.approx(math.fsum(finite) / finite.size, rel=1e-9, abs=1e-9 * scale)
    assert found.std == pytest.approx(float(finite.std()), rel=1e-7, abs=1e-9 * scale)
    assert found.norm == pytest.approx(float(np.linalg.norm(finite)), rel=1e-9)


def test_a_small_spread_beside_a_large_mean_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PART", 7)
    values = 1e9 + np.arange(100) / 64
    exact = [Fraction(float(v)) for v in values]
    mean = sum(exact) / len(exact)
    variance = sum((v - mean) ** 2 for v in exact) / len(exact)
    found = statistics(values)
    assert found.std == pytest.approx(math.sqrt(variance), rel=1e-6)
    # The control: sums of squares alone lose it.
    assert math.sqrt(max(0.0, float(np.mean(values**2) - np.mean(values) ** 2))) != pytest.approx(
        math.sqrt(variance), rel=1e-6
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_])
def test_every_element_type(dtype: Any) -> None:
    found = statistics(np.array([[0, 1], [1, 0]]).astype(dtype))
    assert (found.least, found.most, found.mean, found.std, found.zeros) == (0.0, 1.0, 0.5, 0.5, 2)
    assert found.norm == pytest.approx(math.sqrt(2))


def test_params_shows_what_the_bundle_holds(built: Path, bundle: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    assert bundle.bundle is not None
    held = bundle.bundle.weights()
    assert main(["inspect", str(built / "bundle"), "--params"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("wte.weight "))
    assert f"{held['wte.weight'].std():.4g}" in row
    assert next(line for line in lines if line.startswith("wte.weight.grad ")).split()[-7:] == ["-"] * 7


def test_params_of_a_checkpoint_has_the_state_of_the_optimiser(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(built / "bundle"), "--steps", "2", "--checkpoint", str(tmp_path / "ck"), "--timeout", "60"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["inspect", str(built / "bundle"), "--params", "--checkpoint", str(tmp_path / "ck"), "--json"]) == 0
    import json

    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "after 2 steps" in captured.err
    assert found["step"]["most"] == 2
    assert any(
        row["norm"] > 0
        for name, row in found.items()
        if name not in ("step", "wte.weight") and name.startswith("wte.weight.")
    )
    # Of another program it is refused.
    assert (
        main(["inspect", str(built / "dumps" / "00_input.ir"), "--params", "--checkpoint", str(tmp_path / "ck")]) == 5
    )
