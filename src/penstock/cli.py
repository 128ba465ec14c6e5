"""The command line: arguments, help, exit codes. What a command does stands in commands.py and the packages beside it.

Data goes to stdout, words for people to stderr. Exit codes: 0 ok, 1 anything else, 2 usage, 3 unsupported model, 4 does not fit,
5 verification failed, 6 peer lost or timeout.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from penstock import __version__
from penstock.argument_types import positive_number, seed_number, whole_number
from penstock.ir.schedule_names import TRAINING
from penstock.model_arguments import RATE_HELP, add_dump_arguments, add_model_arguments
from penstock.support.errors import DoesNotFit, PenstockError, UsageError
from penstock.support.out_of_memory import is_out_of_memory
from penstock.support.words import meant, visible, visible_lines
from penstock.verify_arguments import add_verify_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    words = [_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    verbose = bool(os.environ.get("PENSTOCK_TRACEBACK")) or "-v" in words or "--verbose" in words
    with _terminated_in_order():
        return _run(words, verbose)


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Being terminated ends a command like an exception, so that its processes and temporary files go with it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(words: list[str], verbose: bool) -> int:
    try:
        arguments = parse(words)
        from penstock import commands

        return int(getattr(commands, arguments.command.replace("-", "_") + "_command")(arguments) or 0)
    except PenstockError as error:
        if verbose:
            raise
        print(f"penstock: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(_ended("interrupted", error), file=sys.stderr)
        return 130
    except SystemExit as error:
        if hasattr(error, "__notes__"):
            print(_ended("terminated", error), file=sys.stderr)
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has gone; give the interpreter nothing left to flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if verbose:
            raise
        code, said = _told(error)
        print(f"penstock: {said}", file=sys.stderr)
        return code


def _ended(how: str, error: BaseException) -> str:
    """What is said of a command that was ended from outside; it may have left word of how far it came."""
    return " ".join([f"penstock: {how}", *map(visible_lines, getattr(error, "__notes__", ()))])


def _told(error: Exception) -> tuple[int, str]:
    """The exit code for an error that is none of ours, and what to say of it."""
    said = visible(" ".join(str(error).split()))[:500]
    if is_out_of_memory(error):
        hint = "a smaller batch or microbatch, more stages, --recompute all and `compile --jobs 1` need less"
        # What cannot be imported for want of memory says much, and of other causes.
        more = f": {said}" if said and not isinstance(error, ImportError) else ""
        return DoesNotFit.exit_code, f"error: the system gave no more memory{more}\n  hint: {hint}"
    if isinstance(error, OSError):
        place = f"{visible(str(error.filename))}: " if error.filename else ""
        return UsageError.exit_code, f"error: {place}{error.strerror or said}"
    # A bug of ours: nobody else can do anything about where it happened.
    return 1, f"internal error: {type(error).__name__}: {said}\n  hint: please report this; -v shows where it happened"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What the arguments say, and defaults for those that are not given."""
    arguments, unknown = command_line().parse_known_args(words)
    # argparse leaves what a command does not know to the parser above it, whose help has none of the command's arguments.
    command: argparse.ArgumentParser = vars(arguments).pop("explained_by")
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def _dashes(word: str) -> str:
    """`--dump_ir` and `--dump-ir` are the same flag."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


# What argparse says of a word that is none of its choices; newer versions of Python leave the quotes out.
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class _Parser(argparse.ArgumentParser):
    """Reports usage errors through our own error class, so that they look and exit like all others."""

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` explains the arguments"
        if (choice := _CHOICE.search(message)) is not None and (
            words := meant(choice[1], re.findall(r"[\w\-]+", choice[2]))
        ):
            hint = f"{words} {hint}"
        raise UsageError(message, hint=hint)


def command_line() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    parser = _Parser(
        prog="penstock",
        description="Compile an ONNX model into a multi-device pipeline bundle, train it, look into it.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
        parser.set_defaults(explained_by=parser)
        return parser

    demo = add(
        "demo", "export a small GPT, compile it for two local CPU devices, train it with 2bw, and show the loss fall"
    )
    demo.add_argument(
        "-o",
        "--out",
        default="demo-out",
        metavar="DIR",
        help="folder for model, bundle, dumps and metrics (default: demo-out)",
    )
    demo.add_argument("--steps", type=positive_number, default=120, metavar="N", help="optimiser steps (default: 120)")
    demo.add_argument("--schedule", choices=TRAINING, default="2bw", help="default: 2bw")
    demo.add_argument("--backend", choices=("tvm", "numpy"), default="tvm", help="default: tvm")

    _add_plan(
        add("plan", "choose stages and devices for a model, or for the graph of a placement file, and show the choice")
    )

    compile = add("compile", "compile a model into a bundle")
    add_model_arguments(compile)
    compile.add_argument("-o", "--out", required=True, metavar="BUNDLE", help="bundle directory to write")
    compile.add_argument("--backend", choices=("tvm", "numpy"), default="tvm", help="code generator (default: tvm)")
    compile.add_argument(
        "--target",
        default="host",
        metavar="NAME",
        help="instruction set to compile for, e.g. host, x86-64-v3 (default: host)",
    )
    compile.add_argument(
        "--jobs", type=positive_number, metavar="N", help="processes to compile with (default: one per core)"
    )

    _add_run(add("run", "train with a bundle: starts one process per rank, or joins as one rank under torchrun"))
    _add_infer(add("infer", "run an inference bundle on arrays, and write its outputs"))

    export = add("export", "write trained weights back into the ONNX model they came from, or into a safetensors file")
    export.add_argument(
        "source", metavar="BUNDLE|CHECKPOINT", help="a bundle, or a checkpoint whose bundle stands where it stood"
    )
    export.add_argument(
        "--onnx", metavar="OUT.onnx", help="the model that was compiled, with these weights and its own names"
    )
    export.add_argument("--safetensors", metavar="OUT.safetensors", help="the weights alone, by the model's own names")
    export.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="take the weights of this checkpoint, or of the newest one in this directory; with 2bw the newer of its two versions "
        "(default: the weights that the model had when it was compiled)",
    )

    sign = add("sign", "vouch for a bundle with a secret key, or check that somebody did")
    sign.add_argument("bundle", metavar="BUNDLE")
    sign.add_argument(
        "--key", required=True, metavar="FILE", help="the key: at least 32 bytes, e.g. of `openssl rand -hex 32`"
    )
    sign.add_argument(
        "--check", action="store_true", help="write nothing; exit code 5 where the signature does not fit"
    )

    _add_checkpoint(
        add("checkpoint", "list checkpoints, check them, or write the weights of one into a safetensors file")
    )

    _add_inspect(add("inspect", "look into a bundle, an IR file or a dump folder"))

    _add_simulate(add("simulate", "run a bundle's program against modelled times, links, NICs, cores and memory"))

    doctor = add("doctor", "measure this machine, or the hosts of a torchrun group, and write a cluster file")
    doctor.add_argument("--cluster-out", metavar="FILE", help="cluster file to write, TOML or YAML (.yaml)")
    doctor.add_argument(
        "--devices", type=positive_number, metavar="N", help="equal CPU devices to divide the machine into (default: 1)"
    )
    doctor.add_argument("--threads", metavar="LIST", help="threads of each CPU device, e.g. 3,1")
    doctor.add_argument("--json", action="store_true", help="print everything as JSON")

    diff = add("diff", "compare two IR files or bundles by name: what is gone, what is new, and the words that changed")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.add_argument("--lines", action="store_true", help="whole lines with context, as `diff -u` prints them")

    opt = add("opt", "run passes over an IR file; goes on from any dump")
    opt.add_argument("file", metavar="FILE.ir")
    pipeline = opt.add_mutually_exclusive_group(required=True)
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
    opt.add_argument("-o", "--out", metavar="OUT.ir", help="default: stdout")
    add_dump_arguments(opt)

    passes = add("passes", "list the passes with their options, explain one, or print a pipeline")
    some = passes.add_mutually_exclusive_group()
    some.add_argument(
        "name",
        nargs="?",
        metavar="PASS",
        help="explain this one: options, what it needs and gives, where it stands and why",
    )
    some.add_argument(
        "--pipeline", choices=("train", "infer"), help="print a pipeline as a file for `penstock opt --pipeline`"
    )

    ops = add("ops", "list the operations and which parts of the compiler support them, or explain one")
    ops.add_argument(
        "name", nargs="?", metavar="OP", help="explain this one: attributes, dimensions, gradient, kernels"
    )

    completion = add("completion", "print what makes a shell complete commands, options, passes and operations")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))

    verify = add(
        "verify",
        "check a model against onnxruntime, a bundle against the interpreter, all of them pass by pass and kernel by kernel "
        "(--bisect), what passes do to an IR file (-p), or 2bw against plain training (--parity)",
    )
    add_model_arguments(verify, metavar="MODEL.onnx|BUNDLE|DUMPS|FILE.ir")
    add_verify_arguments(verify)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    grading = parser.add_argument_group("after a run (MODEL.onnx is then a bundle)")
    grading.add_argument(
        "--grade",
        metavar="METRICS",
        help="compare what the bundle's plan predicted with the metrics of a run, and keep corrections",
    )
    grading.add_argument(
        "--trace", metavar="FILE", help="with --grade: the trace of the run, for computations one by one"
    )
    workload = parser.add_argument_group("placement files (in place of a model)")
    workload.add_argument(
        "--workload", metavar="FILE.json", help="a graph in the public device-placement format (docs/placement.md)"
    )
    workload.add_argument(
        "--objective",
        choices=("throughput", "latency"),
        help="what is minimised: the largest load of a device, or the time of one sample alone (default: throughput)",
    )
    splits = workload.add_mutually_exclusive_group()
    splits.add_argument("--contiguous", action="store_true", help="devices take contiguous sets of nodes (default)")
    splits.add_argument("--any", action="store_true", help="devices take any nodes: throughput only")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument(
        "--data",
        default="synthetic",
        metavar="FILE|synthetic",
        help="samples: .npz, .safetensors, .parquet, a folder of .npy, FILE:u16 of tokens, or INPUT=FILE,... (docs/data.md; default: "
        "synthetic)",
    )
    parser.add_argument(
        "--steps", type=positive_number, default=10, metavar="N", help="optimiser steps in this run (default: 10)"
    )
    parser.add_argument("--shuffle", action="store_true", help="visit samples in a new order every epoch")
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="N", help="for --shuffle and synthetic data (default: 0)"
    )
    parser.add_argument(
        "--last-batch",
        choices=("wrap", "drop", "pad"),
        default="wrap",
        help="where samples are no multiple of a batch: go on with the next epoch, drop the rest, or fill up from the same epoch "
        "(default: wrap)",
    )
    parser.add_argument(
        "--eval-data",
        metavar="FILE",
        help="samples to compute the mean loss of, without training on them (docs/data.md)",
    )
    parser.add_argument(
        "--eval-every", type=positive_number, metavar="N", help="steps between evaluations (default: one at the end)"
    )
    parser.add_argument(
        "--lr", type=float, metavar="X", help="learning rate, in place of the one the bundle was compiled with"
    )
    parser.add_argument(
        "--lr-schedule", metavar="R", help=RATE_HELP + ", in place of the one the bundle was compiled with"
    )
    _add_saving(parser)
    _add_failing(parser)
    _add_showing(parser)


def _add_saving(parser: argparse.ArgumentParser) -> None:
    """What a run writes to go on from."""
    parser.add_argument("--metrics", metavar="FILE", help="write one JSON object per step")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="write checkpoints here, at the end and every --checkpoint-every steps"
    )
    parser.add_argument("--checkpoint-every", type=positive_number, metavar="N", help="steps between checkpoints")
    parser.add_argument(
        "--keep-last",
        type=positive_number,
        metavar="N",
        help="remove older checkpoints, but for the newest N (default: keep all)",
    )
    parser.add_argument(
        "--checkpoint-wait",
        action="store_true",
        help="let training wait while a checkpoint is written, which needs no memory for a copy of the state",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from the newest whole checkpoint in this directory, or from this checkpoint",
    )


def _add_failing(parser: argparse.ArgumentParser) -> None:
    """When a run gives up, and what it does then."""
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=10.0,
        metavar="S",
        help="a rank without a sign of life for so long is lost; 0: never (default: 10)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="give up when a peer that lives keeps a rank waiting this long (default: 600)",
    )
    parser.add_argument(
        "--nan",
        choices=("stop", "skip", "warn"),
        default="warn",
        help="a loss or gradient that is not finite: end the run, insist on a bundle that leaves such updates out, or warn (default: warn)",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole_number,
        default=0,
        metavar="N",
        help="start the workers again after a failure, from the newest checkpoint, up to N times (default: 0; under torchrun that is its "
        "option)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="with fewer devices than before plan anew on those that are left, and go on (default: end with an error)",
    )


def _add_showing(parser: argparse.ArgumentParser) -> None:
    """Where a run shows what it does, and who may hear."""
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of every action")
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="KIND:WHERE",
        help="send metrics there, too: tensorboard:DIR, wandb:PROJECT, mlflow:EXPERIMENT, prometheus:[HOST:]PORT or prometheus:FILE.prom; "
        "may be given several times",
    )
    parser.add_argument(
        "--log-ranks",
        default="0",
        metavar="LIST",
        help="whose processes' own output to show, with rank and stage before each line: all, none, or numbers such as 0,2; "
        "errors are shown in any case (default: 0)",
    )
    parser.add_argument(
        "--secret",
        metavar="FILE",
        help="in a group: what its ranks have in common and nobody else has, at least 32 bytes (docs/security.md)",
    )
    parser.add_argument(
        "--tls",
        metavar="DIR",
        help="in a group: let the keepers of the ranks speak over TLS, with cert.pem and key.pem of this directory",
    )


def _add_infer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument(
        "--data",
        "--input",
        required=True,
        metavar="X.npz|synthetic",
        help="one array per input, any number of samples along the first axis; synthetic: seeded noise, to measure",
    )
    parser.add_argument("--output", metavar="Y.npz", help="one array per output")
    parser.add_argument(
        "--mode",
        choices=("throughput", "latency"),
        default="throughput",
        help="throughput: many requests at once, which share microbatches; latency: one at a time (default: throughput)",
    )
    parser.add_argument(
        "--request", type=positive_number, metavar="N", help="samples per request (default: those of a microbatch)"
    )
    parser.add_argument(
        "--samples",
        type=positive_number,
        metavar="N",
        help="with --data synthetic: how many (default: 64 microbatches)",
    )
    parser.add_argument("--seed", type=seed_number, default=0, metavar="N", help="of --data synthetic (default: 0)")
    parser.add_argument(
        "--json", action="store_true", help="print throughput and percentiles of latency as one JSON object"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="give up when a peer keeps a rank waiting this long (default: 60)",
    )


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="BUNDLE|FILE.ir")
    parser.add_argument(
        "--cluster", metavar="FILE", help="other devices and links than those it was planned for, under the same names"
    )
    parser.add_argument("--batches", type=positive_number, default=10, metavar="N", help="batches to run (default: 10)")
    parser.add_argument(
        "--costs",
        choices=("analytic", "table", "measured"),
        default="analytic",
        help="where times of computations come from: the rates of the cluster, what was measured on this machine before, "
        "or each rank of the bundle run by itself here (default: analytic)",
    )
    parser.add_argument("--latency", type=float, metavar="S", help="seconds on all links, in place of the cluster's")
    parser.add_argument(
        "--bandwidth", type=float, metavar="X", help="bytes per second of all links and NICs, in place of the cluster's"
    )
    parser.add_argument("--gantt", metavar="FILE.svg", help="draw every rank's run, with memory over time")
    parser.add_argument("--trace", metavar="FILE.json", help="write a Chrome trace of every action")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")


def _add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("file", metavar="BUNDLE|FILE.ir|DUMPS")
    inspect.add_argument(
        "--why",
        metavar="NAME",
        help="all about an operation: its source, passes, stage, kernel and messages; NAME is a value, a variable, "
        "a kernel such as s0.F/k3, a node of the model or a module of it",
    )
    inspect.add_argument(
        "--dumps",
        metavar="DIR",
        help="with --why or --html: the dump folder of the compilation, which knows all passes",
    )
    inspect.add_argument(
        "--graph", action="append", metavar="NAME", help="print one graph, e.g. s0.F, or those of a stage, e.g. s0"
    )
    inspect.add_argument(
        "--flow",
        action="append",
        metavar="NAME",
        help="draw the operations of a graph with the values that flow between them",
    )
    inspect.add_argument("--op", metavar="REGEX", help="print operations whose text matches")
    inspect.add_argument(
        "--schedule", action="store_true", help="print the schedule as a grid, and each rank's actions"
    )
    inspect.add_argument(
        "--memory", action="store_true", help="print predicted peak memory per rank, and what lives over time"
    )
    inspect.add_argument(
        "--trace",
        metavar="FILE",
        help="with --memory: what a run with --trace held, beside the plan, and which blocks lay idle; with --html: that run beside the "
        "plan",
    )
    inspect.add_argument(
        "--params",
        action="store_true",
        help="list parameters, buffers and state with sizes, and statistics of a bundle's weights",
    )
    inspect.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="with --params: statistics of this checkpoint, or of the newest one in this directory",
    )
    inspect.add_argument(
        "--kernels", action="store_true", help="list the kernels of every stage: operations, work, roofline time, share"
    )
    inspect.add_argument(
        "--measure",
        action="store_true",
        help="with --kernels: compile each kernel by itself and time it on this machine",
    )
    inspect.add_argument("--source", metavar="NAME", help="print the source of one kernel, e.g. s0.F/k3")
    inspect.add_argument(
        "--export",
        action="append",
        metavar="FILE",
        help="write the model as .dot (Graphviz) or .onnx (Netron) with stages and devices, or the schedule as .json (Chrome trace, "
        "simulated) or .csv; may be given several times",
    )
    inspect.add_argument(
        "--html",
        metavar="FILE",
        help="write a report for a browser, from graph to kernels: one file, which needs nothing else (docs/report.md)",
    )
    inspect.add_argument(
        "--json", action="store_true", help="print the summary, or --why, --memory, --params or --kernels, as JSON"
    )
    inspect.add_argument(
        "--batches",
        type=positive_number,
        default=3,
        metavar="N",
        help="batches to show with --schedule, --memory and --export (default: 3)",
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    rows = (
        ("ls", "DIR", "list the checkpoints of a directory"),
        ("verify", "DIR|CHECKPOINT", "compare all files with their hashes"),
        (
            "export",
            "DIR|CHECKPOINT",
            "write parameters by the model's names; of a directory, those of the newest checkpoint",
        ),
    )
    # The placeholder is what an error says is missing.
    actions = parser.add_subparsers(dest="action", metavar="|".join(name for name, _, _ in rows), required=True)
    for name, place, text in rows:
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.set_defaults(explained_by=action)
        action.add_argument("place" if name == "export" else "path", metavar=place)
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "export":
            action.add_argument("--to", required=True, metavar="FILE.safetensors", help="the file to write")
