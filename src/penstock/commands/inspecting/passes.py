"""`penstock passes`: the passes, one of them, or a pipeline."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock passes`."""
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "name",
        nargs="?",
        metavar="PASS",
        help="explain this one: options, what it needs and gives, where it stands and why",
    )
    some.add_argument(
        "--pipeline", choices=("train", "infer"), help="print a pipeline as a file for `penstock opt --pipeline`"
    )


def run(arguments: Namespace) -> None:
    """Print the list, an explanation, or a pipeline."""
    from penstock.inspection.reference.passes import known, list_passes, pass_help  # lazy: heavy
    from penstock.passes.pipelines import PASSES, pipeline_text  # lazy: heavy

    if arguments.pipeline is not None:
        sys.stdout.write(pipeline_text(arguments.pipeline))
    elif arguments.name is not None:
        print("\n".join(pass_help(known(arguments.name, PASSES, "pass", "penstock passes"))))
    else:
        print("\n".join(list_passes()))
