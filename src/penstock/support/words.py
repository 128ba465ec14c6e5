"""Wording of messages: counts, bytes, lists, flags for a shell, and the escaping of quoted text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 stage`, `2 stages`, `2 microbatches`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return a noun with the numbers that things have: `stage 1`, `stages 0, 3`."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def shown_bytes(count: float) -> str:
    """Return bytes for people: 1536 -> 1.5 KiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def shown_rate(count: float, unit: str = "B/s") -> str:
    """Return a rate for people in thousands, as cluster files have them: 1.25e8 -> 125 MB/s."""
    scales = ["", "k", "M", "G", "T", "P"]
    while float(f"{count:.3g}") >= 1000 and len(scales) > 1:
        count /= 1000
        scales.pop(0)
    rounded = float(f"{count:.3g}")
    return f"{rounded:.0f} {scales[0]}{unit}" if rounded >= 100 else f"{rounded:g} {scales[0]}{unit}"


def exact_bytes(count: int) -> str:
    """Return bytes for people with the number itself, for a size that may be close to a limit."""
    return f"{shown_bytes(count)} ({count} bytes)" if count >= 1024 else shown_bytes(count)


def flag_for(flag: str, name: str, value: object) -> str:
    """Return `--dim NAME=VALUE` as a shell takes it: names of models may hold blanks, operators and quotes."""
    word = shlex.quote(f"{name}={value}")
    # A word that begins with a dash would be taken for a flag of its own.
    return f"{flag}={word}" if name.startswith("-") else f"{flag} {word}"


def meant(name: str, names: Iterable[str]) -> str:
    """Return `did you mean this or that?` with similar names; empty where there are none."""
    close = get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else ""


# Layouts for a whole model may have the same problem for each of its tensors.
MOST_ITEMS = 20


def itemised(problems: Iterable[str], most: int | None = None) -> str:
    """Return each problem on a line, to stand below a heading: all, or so many of them and the number of the others."""
    listed = [*problems]
    others = len(listed[most:]) if most is not None else 0
    return "".join(f"\n  - {problem}" for problem in listed[:most]) + (f"\n  - and {others} more" if others else "")


def visible(text: str) -> str:
    """Return the text with escapes for control characters, other unprintable ones, and those that
    change the direction.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# Names and values in messages come from files, where they may be of any length.
LONGEST_LINE, MOST_LINES = 4000, 1000


def shortened(text: str) -> str:
    """Return a message of which everyone can see the end: long lines and many lines are cut, and say so."""
    lines = text.split("\n")
    shown = [
        line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ... ({len(line) - LONGEST_LINE} more characters)"
        for line in lines[:MOST_LINES]
    ]
    return "\n".join([*shown, *([f"  ... ({len(lines) - MOST_LINES} more lines)"] if len(lines) > MOST_LINES else [])])


# Lines below the first that are not indented again: indented ones, and those of a numbered list.
_BELOW = re.compile(r"  |\d+\. |$")


def visible_lines(text: str) -> str:
    """Escape a message of several lines.

    Ends of lines stay, and lines after the first are indented, so that no quoted text looks like a line of the program.
    """
    if text.isprintable():
        return text
    first, *below = map(visible, text.split("\n"))
    return "\n".join([first, *(line if _BELOW.match(line) else f"  {line}" for line in below)])
