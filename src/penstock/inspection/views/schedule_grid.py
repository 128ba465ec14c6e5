"""A schedule as a grid of text: a row for each rank, and rows for what it copies between memory spaces.

In: a schedule, played on paper (ir/grid.py). Out: text with a column for each unit of time.

A rank that copies has a row for what comes to its device, and one for what goes. A copy stands in the columns between
its action and the first action that waits for it: so much time hides it. One that is waited for at once has a `!`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.ir.action_kinds import (
    AGAIN,
    BACKWARD,
    CHUNK_ITEM,
    COPY_IN,
    COPY_OUT,
    DROP,
    FORWARD,
    GRADIENTS_ITEM,
    LET_GO,
    SAVED_ITEM,
    STATE_ITEM,
    SUM,
    UPDATE,
    WEIGHTS,
    WEIGHTS_ITEM,
)
from penstock.ir.grid import Timed, simulate
from penstock.ir.memory.items import ItemClaims, is_brought, is_let_go
from penstock.ir.schedule import ADDERS, COPIES, MESSAGES, READERS, SUM_USERS, Action, Schedule

# In the grid an action is a bar, a note behind the computation before it, or not there unless it is marked.
BAR, NOTE, HIDDEN = "bar", "note", ""
GRID: dict[str, str] = {
    **dict.fromkeys((FORWARD, AGAIN, BACKWARD, WEIGHTS), BAR),
    **dict.fromkeys((SUM, *SUM_USERS), NOTE),
    # Copies have rows of their own.
    **dict.fromkeys((*MESSAGES, *COPIES, LET_GO, DROP), HIDDEN),
}
LANES = {COPY_IN: "in", COPY_OUT: "out"}
# The computations that wait for an item, by the letter of the item. A saved set is taken by what follows its forward.
_USERS: dict[str, tuple[str, ...]] = {
    STATE_ITEM: (UPDATE,),
    CHUNK_ITEM: (UPDATE,),
    WEIGHTS_ITEM: (*READERS, UPDATE),
    GRADIENTS_ITEM: ADDERS,
    SAVED_ITEM[0]: READERS[1:],
}


class TimedCopy(NamedTuple):
    """A copy: the action that begins it, and the times of that and of the first action that waits for it."""

    action: Action
    begins: float
    awaited: float


def copies(line: Sequence[Timed]) -> Iterator[TimedCopy]:
    """Yield the copies of a rank, whose actions come with their start and finish. What is claimed once more is not
    copied, and a claim that is not the last one ends without a wait."""
    claims, moving = ItemClaims(), list[Timed]()
    for timed in line:
        action = timed[0]
        claimed = (is_brought(action) or is_let_go(action)) and action.item != SAVED_ITEM
        if not claimed or claims.change(action):
            moving.append(timed)
    for place, (action, _, begins) in enumerate(moving):
        if action.kind in COPIES:
            ends = (start for other, start, _ in moving[place + 1 :] if _awaits(other, action))
            yield TimedCopy(action, begins, next(ends, line[-1][2]))


def _awaits(other: Action, copy: Action) -> bool:
    """Return whether an action waits for a copy."""
    if other.stage != copy.stage:
        return False
    if copy.kind == COPY_OUT:
        number = other.mb if copy.item == WEIGHTS_ITEM else copy.mb
        return (other.kind, other.item, other.version, other.mb) == (LET_GO, copy.item, copy.version, number)
    if other.kind not in _USERS[copy.item[0]]:
        return False
    if copy.item[0] == CHUNK_ITEM:
        return other.item in (copy.item, "") and other.mb == copy.mb
    if copy.item == SAVED_ITEM:
        return other.mb == copy.mb
    return copy.version is None or other.version == copy.version + (other.kind == UPDATE)


def lane_rows(line: Sequence[Timed], columns: int, packed: bool) -> dict[str, list[str]]:
    """Return the cells of the lanes of a rank, by the lane's name; none where it copies nothing. Texts name the stage
    where the rank runs several."""
    rows: dict[str, list[str]] = {}
    for copy in copies(line) if columns else ():
        cells = rows.setdefault(LANES[copy.action.kind], ["."] * columns)
        first, end = min(round(copy.begins), columns - 1), round(copy.awaited)
        text = str(copy.action) if packed else str(copy.action)[len(str(copy.action.stage)) :]
        text += "" if end > round(copy.begins) else "!"
        cells[first] = text if cells[first] in (".", "=") else f"{cells[first]},{text}"
        cells[first + 1 : end] = ["=" if cell == "." else cell for cell in cells[first + 1 : end]]
    return dict(sorted(rows.items()))


def format_grid(schedule: Schedule, batches: int, *, width: int | None = None) -> str:
    """Format a schedule as a grid with one row per rank and one column per unit of time. Forwards take one unit and
    backwards two, or one and W one. U and collectives stand after the computation they follow. What a rank copies
    between memory spaces has rows below it. With a `width` the grid goes on below where a line would be longer."""
    played = simulate(schedule, batches)
    packed = any(len(schedule.stages_of(rank)) > 1 for rank in schedule.ranks)
    columns = round(played.finish)
    cells = {rank: ["."] * columns for rank in played.ranks}
    for rank, line in played.ranks.items():
        for action, start, finish in line:
            text = f"{action.stage if packed else ''}{action.kind}{action.mb}" + (
                f"@{action.version}" if action.version is not None else f":{action.item}" if action.item else ""
            )
            at = round(start)
            if GRID[action.kind] == BAR:
                cells[rank][at : round(finish)] = [text] + ["="] * (round(finish) - at - 1)
            elif GRID[action.kind] == NOTE and at:
                cells[rank][at - 1] += f",{text}"
    rows: list[tuple[str, list[str]]] = []
    for rank, line in played.ranks.items():
        rows.append((f"rank {rank}", cells[rank]))
        rows += lane_rows(line, columns, packed).items()
    head = max((len(name) for name, _ in rows), default=0)
    widths = [max((len(row[i]) for _, row in rows), default=1) for i in range(columns)]
    lines: list[str] = []
    for begin, end in _pieces(widths, None if width is None else width - head - len(" | ")):
        lines += [""] * bool(lines)
        for name, row in rows:
            shown = zip(row[begin:end], widths[begin:end], strict=True)
            lines.append(f"{name:>{head}} | " + " ".join(f"{c:<{w}}" for c, w in shown).rstrip())
    busy = sum(t.finish - t.start for line in played.ranks.values() for t in line)
    idle = 1 - busy / (columns * len(cells)) if columns else 0.0
    return "\n".join([*lines, f"{columns} units of time, {idle:.0%} idle"])


def _pieces(widths: Sequence[int], room: int | None) -> Iterator[tuple[int, int]]:
    """Yield the columns from and to for each piece that is at most so wide; a column that is wider has a piece of its
    own."""
    begin, used = 0, 0
    for i, width in enumerate(widths):
        if room is not None and i > begin and used + width > room:
            yield begin, i
            begin, used = i, 0
        used += width + 1
    yield begin, len(widths)
