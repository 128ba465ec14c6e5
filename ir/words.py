"""Words of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `2 microbatches`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def visible(text: str) -> str:
    """The text with escapes in the place of what a terminal would obey, or not show: control characters, and those that turn the direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def visible_lines(text: str) -> str:
    """The same of text that has lines, whose ends stay."""
    return text if text.isprintable() else "\n".join(map(visible, text.split("\n")))
