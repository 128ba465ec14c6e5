"""Words of messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `2 microbatches`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def shown_bytes(count: float) -> str:
    """Bytes for people: 1536 -> 1.5 KiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def exact_bytes(count: int) -> str:
    """The same with the number itself, for what is compared with a limit it may be close to."""
    return f"{shown_bytes(count)} ({count} bytes)" if count >= 1024 else shown_bytes(count)


def meant(name: str, names: Iterable[str]) -> str:
    """`did you mean this or that?`, of names that look like one there is not; nothing where none does."""
    close = get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else ""


def itemised(problems: Iterable[str]) -> str:
    """Each on a line of its own, to stand below what is said of all of them."""
    return "".join(f"\n  - {problem}" for problem in problems)


def visible(text: str) -> str:
    """The text with escapes in the place of what a terminal would obey, or not show: control
    characters, and those that turn the direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# Lines below the first that stay where they are: those indented already, and those of a numbered list.
_BELOW = re.compile(r"  |\d+\. |$")


def visible_lines(text: str) -> str:
    """The same of a message that has lines. Their ends stay, and what follows the first is indented: nothing that is quoted looks like
    a line of the program that prints it."""
    if text.isprintable():
        return text
    first, *below = map(visible, text.split("\n"))
    return "\n".join([first, *(line if _BELOW.match(line) else f"  {line}" for line in below)])
