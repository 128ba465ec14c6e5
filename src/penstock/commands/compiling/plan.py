"""`penstock plan`: choose stages and devices for a model, and show the choice.

With --grade (commands/running/grade.py) and --workload (placement.py) it is about other things than models.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from penstock.commands.arguments import add_model_arguments, dump_of
from penstock.commands.rare import show_rarely
from penstock.commands.running import grade
from penstock.support.errors import UsageError

from . import placement
from .planned import plan_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add those of a model, of a grade and of placement files."""
    add_model_arguments(parser, optional=True)
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="print the plan as JSON")
    grading = parser.add_argument_group("after a run (MODEL.onnx is then a bundle)")
    grading.add_argument(
        "--grade",
        metavar="METRICS",
        help="compare what the bundle's plan predicted with the metrics of a run, and keep corrections",
    )
    trace = grading.add_argument(
        "--trace", metavar="FILE", help="with --grade: the trace of the run, for computations one by one"
    )
    workload = parser.add_argument_group("placement files (in place of a model)")
    file = workload.add_argument(
        "--workload", metavar="FILE.json", help="a graph in the public device-placement format (docs/placement.md)"
    )
    splits = workload.add_mutually_exclusive_group()
    contiguous = splits.add_argument(
        "--contiguous", action="store_true", help="devices take contiguous sets of nodes (default)"
    )
    anything = splits.add_argument("--any", action="store_true", help="devices take any nodes: throughput only")
    show_rarely(trace, file, contiguous, anything)


def run(arguments: Namespace) -> None:
    """Plan, and print the plan."""
    if arguments.grade is not None:
        grade.run(arguments)
        return
    if arguments.trace is not None:
        raise UsageError("--trace without --grade", hint="`penstock run --trace` writes one")
    placement.check(arguments)
    if arguments.workload is not None:
        placement.run(arguments)
        return
    from penstock.planning.explain import as_json, plan_lines  # lazy: heavy

    dump = dump_of(arguments)
    plan = plan_of(arguments, dump)
    if dump is not None:
        dump.report(plan.module, plan.as_dict(), plan.predicted)
    if arguments.json:
        print(as_json(plan))
    else:
        for line in plan_lines(plan, searched=True):
            print(line)
