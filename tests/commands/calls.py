"""Commands, called in this process."""

from __future__ import annotations

from pathlib import Path

from penstock.commands.parser import main


def call(*words: str | Path) -> int:
    return main([str(w) for w in words])
