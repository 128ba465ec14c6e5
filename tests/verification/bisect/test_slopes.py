"""Derivatives are judged by differences: kinks that are near are no fault, a wrong number is one."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.ir.graph import Graph
from penstock.verification.bisect.slopes import ALLOWED, Slopes

DIRECTION = float(np.random.default_rng([0, zlib.crc32(b"@x")]).standard_normal((1,))[0])
FAR = 3e-6 * DIRECTION


def error(loss: Callable[[float], float], gradient: float) -> float:
    trial, module = SimpleNamespace(seed=0), SimpleNamespace(graphs={"F": Graph("F", (), (), ())})
    slopes = Slopes(cast(Any, trial), cast(Any, module))
    return slopes._error("@x", np.array([gradient]), np.zeros(1), lambda added: loss(float(added[0])))


@pytest.mark.parametrize(
    ("loss", "slope"),
    [
        (lambda x: 2 * x + x * x, 2.0),
        (lambda x: 2 * x + abs(x - FAR), 2.0 - np.sign(FAR)),
        (lambda x: 2 * x + abs(x + FAR), 2.0 + np.sign(FAR)),
        # Two kinks, one on either side: the second difference does not see them.
        (lambda x: 2 * x + abs(x - FAR) - abs(x + FAR), 2.0 - 2 * np.sign(FAR)),
        (lambda x: 2 * x + sum((-1) ** k * abs(x - FAR * (k - 7.5)) for k in range(16)), 2.0),
    ],
)
def test_kinks_are_no_fault_and_wrong_numbers_are(loss: Callable[[float], float], slope: float) -> None:
    assert error(loss, slope) <= ALLOWED.error
    for wrong in (1e-3, 0.1, -1.0):
        assert error(loss, slope + wrong) > ALLOWED.error


@pytest.mark.parametrize("slope", [1.0, 2.0, 3.0])
def test_at_a_kink_any_slope_between_its_sides_will_do(slope: float) -> None:
    assert error(lambda x: 2 * x + abs(x), slope) <= ALLOWED.error
    assert error(lambda x: 2 * x + abs(x), slope + 3) > ALLOWED.error


def test_a_loss_that_is_not_finite_has_no_derivative() -> None:
    assert not error(lambda x: float("nan") if x > 0 else x, 1.0) <= ALLOWED.error
    assert not error(lambda x: x, float("nan")) <= ALLOWED.error
