"""`penstock opt`: run passes over an IR file."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.commands.arguments import add_dump_arguments, check_writable, dump_of
from penstock.support.errors import UsageError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock opt`."""
    parser.add_argument("file", metavar="FILE.ir")
    pipeline = parser.add_mutually_exclusive_group(required=True)
    pipeline.add_argument(
        "-p",
        "--passes",
        metavar="PIPELINE",
        help="e.g. 'partition{stages=4},split', or @FILE; `penstock passes` lists them",
    )
    pipeline.add_argument(
        "--pipeline",
        metavar="FILE",
        help="a pipeline with a pass per line and // comments, as `penstock passes --pipeline train` prints them",
    )
    parser.add_argument("-o", "--out", metavar="OUT.ir", help="default: stdout")
    add_dump_arguments(parser)


def _pipeline_of(arguments: Namespace) -> tuple[str, str]:
    """Read the text of a pipeline, and say where it is from: the command line, or a file."""
    path = arguments.pipeline or (arguments.passes[1:] if arguments.passes.startswith("@") else None)
    if path is None:
        return arguments.passes, "-p"
    try:
        return Path(path).read_text(encoding="utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=path, hint="expected a file with a pipeline") from error


def run(arguments: Namespace) -> None:
    """Run the passes, and print the module."""
    from penstock.inspection.subject import load_module  # lazy: heavy
    from penstock.ir.files import verify_read  # lazy: heavy
    from penstock.ir.text import print_module  # lazy: heavy
    from penstock.passes.manager import parse_pipeline, run_passes  # lazy: heavy
    from penstock.passes.pipelines import PASSES  # lazy: heavy

    check_writable({"-o": arguments.out})
    text, where = _pipeline_of(arguments)
    calls = parse_pipeline(text, PASSES, where)
    before = load_module(arguments.file)
    if arguments.dump_ir and Path(arguments.file).resolve().parent == Path(arguments.dump_ir).resolve():
        raise UsageError(
            f"{arguments.file} lies in it, and a dump may take its place", where="--dump-ir", hint="give another folder"
        )
    verify_read(before, arguments.file)
    dump = dump_of(arguments)
    module = run_passes(before, calls, PASSES, dump=dump)
    if dump is not None:
        dump.program(module)
        dump.report(module)
    text = print_module(module)
    if arguments.out:
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.out).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
