"""`penstock ops`: the operations, or one of them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock ops`."""
    parser.add_argument(
        "name", nargs="?", metavar="OP", help="explain this one: attributes, dimensions, gradient, kernels"
    )


def run(arguments: Namespace) -> None:
    """Print the list, or an explanation."""
    from penstock.inspection.reference.ops import list_ops, op_help  # lazy: heavy
    from penstock.inspection.reference.passes import known  # lazy: heavy
    from penstock.ir.ops import OPS  # lazy: heavy

    if arguments.name is None:
        print("\n".join(list_ops()))
    else:
        print("\n".join(op_help(known(arguments.name, OPS, "operation", "penstock ops"))))
