"""`penstock completion`: a script that makes a shell complete what penstock takes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: Namespace) -> None:
    """Print the script of a shell."""
    from penstock.inspection.reference.completion import script  # lazy: heavy

    print(script(arguments.shell, arguments.command_line()), end="")
