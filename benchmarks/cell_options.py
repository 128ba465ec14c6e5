"""The options of benchmarks that measure cell by cell and go on with a file of results.

In: a benchmark's text, and the names of its cells. Out: its parser; and its arguments, once they name cells that there
are. Being terminated ends such a benchmark as an interrupt does, so that it leaves no groups and namespaces behind.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Collection
from pathlib import Path


def cell_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all of them have."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures; cells that are in it stay")
    parser.add_argument("--only", nargs="+", default=[], metavar="CELL", help="such as 3-mlp")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="N", help="begin no cell after this time (default: all)"
    )
    return parser


def begin_cells(parser: argparse.ArgumentParser, only: Collection[str], known: Collection[str], missing: str) -> None:
    """End with an error where a cell is not known, or this host is missing something."""
    if unknown := set(only) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if missing:
        parser.error(f"this host cannot make the clusters: {missing}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
