"""`penstock compile`: plan a model, make code for every stage, and write a bundle."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.commands.arguments import add_model_arguments, add_settings, dump_of, settings_from
from penstock.planning.options import BuildOptions, GenerationSettings
from penstock.support.terminal import Progress, say

from .planned import plan_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add those of a model, and those of making code."""
    add_model_arguments(parser)
    add_settings(parser.add_argument_group("text (docs/generation.md)"), GenerationSettings)
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--out", required=True, metavar="BUNDLE", help="bundle directory to write")
    add_settings(output, BuildOptions)


def run(arguments: Namespace) -> None:
    """Compile, and print the plan."""
    from penstock.backends.bundle.writer import check_replaceable  # lazy: heavy
    from penstock.backends.registry import check_cache  # lazy: heavy
    from penstock.planning.build import build  # lazy: heavy
    from penstock.planning.explain import plan_lines  # lazy: heavy
    from penstock.planning.watching import Feedback  # lazy: heavy

    check_replaceable(Path(arguments.out))
    check_cache(arguments.backend)
    dump = dump_of(arguments)
    plan = plan_of(arguments, dump)
    feedback = Feedback(dump, Progress("compile"))
    path = build(plan, arguments.out, settings_from(BuildOptions, arguments), feedback)
    for line in plan_lines(plan):
        print(line)
    say(f"wrote {path}")
    if arguments.dump_ir:
        say(f"dumps are in {arguments.dump_ir}")
