"""`penstock diff`: two IR files or bundles, compared by name or line by line."""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, Namespace

from penstock.support.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock diff`."""
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--lines", action="store_true", help="whole lines with context, as `diff -u` prints them")


def run(arguments: Namespace) -> None:
    """Print what is different."""
    from penstock.inspection.diff import differences  # lazy: heavy
    from penstock.inspection.subject import load_module  # lazy: heavy
    from penstock.inspection.views import colours  # lazy: heavy
    from penstock.ir.text import print_module  # lazy: heavy

    a, b = (load_module(path) for path in (arguments.a, arguments.b))
    if arguments.lines:
        before, after = (print_module(module).splitlines() for module in (a, b))
        lines = difflib.unified_diff(before, after, arguments.a, arguments.b, lineterm="", n=3)
    else:
        lines = differences(a, b)
    coloured = colours.wanted()
    different = False
    for line in lines:
        different = True
        print(colours.paint_changes(line) if coloured else line)
    if not different:
        say("no difference")
