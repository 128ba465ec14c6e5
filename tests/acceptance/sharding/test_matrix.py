"""Every legal cell of the matrix trains as one device does, every other one is refused in words.

The judge is the program on one device. Level 1 adds up in the order of level 0, so its losses are the same bit for bit.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .matrix import CELLS, FILE, STEPS, UNLIKE, Cell, at_level_zero, on_one_device, outcome, refusals, table_of

TOLERANCE = 1e-6
# In every run of the tests: parts of two versions of weights, with what is computed again, and unlike packs.
DRAWN = [
    Cell("2bw", 3, 1, "all"),
    Cell("interleaved", 1, 1, "none", offload="state"),
    Cell("interleaved", 0, 2, "all", replicas=1),
    Cell("interleaved", 3, UNLIKE, "none"),
    Cell("interleaved-2bw", 1, 1, "none"),
]
COMMITTED: dict[Cell, dict[str, Any]] = {Cell(*row["cell"]): row for row in json.loads(FILE.read_text("utf-8"))}


@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=() if c in DRAWN else pytest.mark.slow) for c in CELLS], ids=str
)
def test_a_cell_trains_as_one_device_or_is_refused(cell: Cell) -> None:
    row, known = outcome(cell), COMMITTED[cell]
    assert row.get("refused") == known.get("refused")
    if "refused" not in row:
        assert row["error"] <= TOLERANCE
        assert row["same_as_level_0"] or cell.level > 1


def test_control_another_recurrence_is_seen() -> None:
    """Losses of 2bw and of its packs are not those of one device under 1f1b, and no step is like another."""
    other = on_one_device("1f1b")
    for schedule in ("2bw", "interleaved-2bw"):
        mine = at_level_zero(schedule, 1, 2)
        assert len(set(mine)) == STEPS
        assert max(abs(a - b) / b for a, b in zip(mine, other, strict=True)) > 100 * TOLERANCE


def test_no_cell_is_refused() -> None:
    """Of levels without replicas there are no cells. The control: what is refused says so in the table."""
    assert {*COMMITTED} == {*CELLS}
    assert not [cell for cell, row in COMMITTED.items() if "refused" in row]
    refused = {"cell": list(CELLS[0]), "refused": "in words"}
    _, lines = table_of([refused])
    assert "refused" in lines[0]
    assert refusals([refused]) == ["in words"]
