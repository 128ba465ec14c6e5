"""The hooks that a notebook calls to display an object. The room that draws them (inspection/notebook.py) is imported
on demand."""

from __future__ import annotations

from importlib import import_module

from .entry_points import ENTRY_POINTS


def in_one_line(shown: object) -> str:
    """Describe an object in one line, for `repr`."""
    return str(import_module(ENTRY_POINTS["notebook"]).in_one_line(shown))


def as_html(shown: object) -> str:
    """Show an object as the result of a cell: a fragment of HTML without scripts."""
    return str(import_module(ENTRY_POINTS["notebook"]).as_html(shown))
