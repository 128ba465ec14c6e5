"""What `penstock demo` says of its prediction."""

from __future__ import annotations

import pytest

from penstock.commands.compiling.demo import grade


def test_the_steps_behind_the_first_ones_count() -> None:
    told = grade(0.01, [0.05] * 5 + [0.01, 0.011, 0.012, 0.013, 0.014], 0.01)
    assert "predicted to take 10.0 ms and took 12.0 ms (median), 1.20 times as long" in told


@pytest.mark.parametrize(("behind", "changed"), [(0.0105, False), (0.0095, False), (0.02, True), (0.005, True)])
def test_a_machine_that_changed_is_named(behind: float, changed: bool) -> None:
    """The control are times behind the run that are nearly those ahead of it."""
    told = grade(0.01, [0.01] * 20, behind)
    assert (f"stages are not as before: a step would take {behind * 1e3:.1f} ms" in told) == changed
    assert ("timed again" in told) == changed
