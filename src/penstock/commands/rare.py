"""The mark of arguments that are rarely used. It stands apart from what reads them, so that help comes at once."""

from __future__ import annotations

import argparse


def show_rarely(*actions: argparse.Action) -> None:
    """Let arguments stand in `--help-all` alone."""
    for action in actions:
        vars(action)["rare"] = True


def is_rare(action: argparse.Action) -> bool:
    """Return whether an argument stands in `--help-all` alone."""
    return bool(vars(action).get("rare"))
