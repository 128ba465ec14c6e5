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


def test_a_derivative_that_is_zero_but_for_rounding() -> None:
    """The loss is a large number that only rounding moves: 1e8 plus less than it can hold. The controls: a derivative
    that would show beside the noise, and one of a loss that is smooth."""
    source = np.random.default_rng(0)

    def noisy(x: float) -> float:
        return 1e8 + float(source.integers(-2, 3)) * 1.5e-8

    assert error(noisy, 1e-6) <= ALLOWED.error
    assert error(noisy, 1.0) > ALLOWED.error
    assert error(lambda x: 2 * x, 2.001) > ALLOWED.error


def test_a_loss_that_is_not_finite_where_it_begins_says_nothing() -> None:
    assert error(lambda x: float("inf"), 1.0) == 0.0
    assert error(lambda x: 0.0, 1.0) > ALLOWED.error
