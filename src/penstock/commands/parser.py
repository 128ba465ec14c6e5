"""The command line: arguments, help, exit codes.

A command has a module of its name in the rooms beside this file, with its arguments and its work. Data goes to stdout,
words for people to stderr. Exit codes: 0 ok, 1 anything else, 2 usage, 3 unsupported model, 4 does not fit, 5
verification failed, 6 peer lost or timeout.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import NoReturn, Protocol, cast

from penstock.support.errors import DISK_ERRORS, DoesNotFit, PenstockError, UsageError
from penstock.support.out_of_memory import is_out_of_memory
from penstock.support.terminal import open_standard_streams, python_warnings_counted, say_as_is
from penstock.support.words import counted, meant, visible, visible_lines
from penstock.version import __version__

from .rare import is_rare


class CommandModule(Protocol):
    """A module of the name of its command, with its arguments and its work. `run` gives an exit code; None is 0."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int | None: ...


# The help of every command, in the order of help.
COMMANDS = {
    "demo": "export a small GPT, compile it for two local CPU devices, train it with 2bw, and show the loss fall",
    "plan": "choose stages and devices for a model, or for the graph of a placement file, and show the choice",
    "compile": "compile a model into a bundle",
    "run": "train with a bundle: starts one process per rank, or joins as one rank under torchrun",
    "infer": "run an inference bundle on arrays, and write its outputs",
    "generate": "continue prompts by the text that a bundle generates",
    "export": "write trained weights back into the ONNX model they came from, or into a safetensors file",
    "sign": "vouch for a bundle with a secret key, or check that somebody did",
    "checkpoint": "list checkpoints, check them, or write the weights of one into a safetensors file",
    "inspect": "look into a bundle, an IR file or a dump folder",
    "simulate": "run a bundle's program against modelled times, links, NICs, cores and memory",
    "doctor": "measure this machine, or the hosts of a torchrun group, and write a cluster file",
    "diff": "compare two IR files or bundles by name: what is gone, what is new, and the words that changed",
    "opt": "run passes over an IR file; goes on from any dump",
    "passes": "list the passes with their options, explain one, or print a pipeline",
    "ops": "list the operations and which parts of the compiler support them, or explain one",
    "completion": "print what makes a shell complete commands, options, passes and operations",
    "verify": "check a model against onnxruntime, a bundle against the interpreter, all of them pass by pass and "
    "kernel by kernel "
    "(--bisect), what passes do to an IR file (-p), or 2bw against plain training (--parity)",
}
# The module of a command is imported when it is named.
MODULES = {
    "demo": "penstock.commands.compiling.demo",
    "plan": "penstock.commands.compiling.plan",
    "compile": "penstock.commands.compiling.compile",
    "run": "penstock.commands.running.run",
    "infer": "penstock.commands.running.infer",
    "generate": "penstock.commands.running.generate",
    "export": "penstock.commands.compiling.export",
    "sign": "penstock.commands.compiling.sign",
    "checkpoint": "penstock.commands.running.checkpoint",
    "inspect": "penstock.commands.inspecting.inspect",
    "simulate": "penstock.commands.running.simulate",
    "doctor": "penstock.commands.running.doctor",
    "diff": "penstock.commands.inspecting.diff",
    "opt": "penstock.commands.inspecting.opt",
    "passes": "penstock.commands.inspecting.passes",
    "ops": "penstock.commands.inspecting.ops",
    "completion": "penstock.commands.completion",
    "verify": "penstock.commands.inspecting.verify",
}

# Packages that a host may lack which only runs bundles (requirements-runtime.txt), by their modules and own names.
_PACKAGES = {
    "tvm": "apache-tvm",
    "apache-tvm": "apache-tvm",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "networkx": "networkx",
    "highspy": "highspy",
    "yaml": "pyyaml",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
}

# Commands that say in one line what libraries warned of. Others run for long, and their warnings come at once.
_WARNINGS_COUNTED = ("plan", "compile", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    open_standard_streams()
    words = [_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    verbose = bool(os.environ.get("PENSTOCK_TRACEBACK")) or "-v" in words or "--verbose" in words
    with _terminated_in_order():
        return _run(words, verbose)


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Convert a termination into an exception, so that the processes and temporary files of a command go with it."""
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
        counted_here = arguments.command in _WARNINGS_COUNTED and not verbose
        with python_warnings_counted() if counted_here else nullcontext():
            return int(arguments.run(arguments) or 0)
    except PenstockError as error:
        if verbose:
            raise
        say_as_is(f"penstock: error: {error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        say_as_is(_ended("interrupted", error))
        return 130
    except SystemExit as error:
        if hasattr(error, "__notes__"):
            say_as_is(_ended("terminated", error))
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            # The reader of the output is gone. The interpreter must have nothing to flush at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if verbose:
            raise
        code, text = _told(error)
        say_as_is(f"penstock: {text}")
        return code


def _ended(how: str, error: BaseException) -> str:
    """Return the message for a command that was ended from outside; notes of the error may say how far it came."""
    return " ".join([f"penstock: {how}", *map(visible_lines, getattr(error, "__notes__", ()))])


def _told(error: Exception) -> tuple[int, str]:
    """Return the exit code for an error that is none of ours, and the message for it."""
    text = visible(" ".join(str(error).split()))[:500]
    if is_out_of_memory(error):
        hint = "a smaller batch or microbatch, more stages, --recompute all and `compile --jobs 1` need less"
        # An import that fails for want of memory raises many kinds of errors, with messages about other causes.
        more = f": {text}" if text and not isinstance(error, ImportError) else ""
        return DoesNotFit.exit_code, f"error: the system gave no more memory{more}\n  hint: {hint}"
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) in _PACKAGES:
        hint = "a whole installation has it (docs/install.md); a host without it runs bundles that others compiled"
        return UsageError.exit_code, f"error: the package {_PACKAGES[missing]} is not installed\n  hint: {hint}"
    if isinstance(error, OSError):
        place = f"{visible(str(error.filename))}: " if error.filename else ""
        code = PenstockError.exit_code if error.errno in DISK_ERRORS else UsageError.exit_code
        return code, f"error: {place}{error.strerror or text}"
    # A bug of Penstock: only its developers can use the place where it happened.
    return 1, f"internal error: {type(error).__name__}: {text}\n  hint: please report this; -v shows where it happened"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, with defaults for those that are not given.

    `run` is what carries them out, `given` the names of those that differ from their defaults, `command_line` gives the
    parser of all commands.
    """
    named = next((word for word in words if not word.startswith("-")), "")
    arguments, unknown = command_line(named).parse_known_args(words)
    # argparse leaves what a command does not know to the parser above it, whose help has none of the command's
    # arguments.
    command: argparse.ArgumentParser = vars(arguments).pop("explained_by")
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    dests = (action.dest for action in command._actions if hasattr(arguments, action.dest))
    arguments.given = [name for name in dests if getattr(arguments, name) != command.get_default(name)]
    arguments.command_line = command_line
    return arguments


def _dashes(word: str) -> str:
    """Write a flag with dashes: `--dump_ir` and `--dump-ir` are the same."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


# The message of argparse for a word that is none of its choices; newer versions of Python leave the quotes out.
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class _HelpFormatter(argparse.HelpFormatter):
    """The usual help, whose lines never break inside of a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser that reports usage errors through our own error class, so that they look and exit like all others."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        return _HelpFormatter(self.prog)

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` explains the arguments"
        if (choice := _CHOICE.search(message)) is not None and (
            words := meant(choice[1], re.findall(r"[\w\-]+", choice[2]))
        ):
            hint = f"{words} {hint}"
        raise UsageError(message, hint=hint)

    def format_help(self) -> str:
        """Return the help without what is rarely used, of which the last line says how much there is."""
        rare = [action for action in self._actions if is_rare(action)]
        return self.explain(without=rare) if rare else super().format_help()

    def explain(self, without: Collection[argparse.Action] = ()) -> str:
        """Return the help of all arguments but some; those that every command has come last."""
        formatter = self._get_formatter()
        formatter.add_usage(
            self._short_usage() if without else self.usage, self._actions, self._mutually_exclusive_groups
        )
        formatter.add_text(self.description)
        for group in sorted(self._action_groups, key=lambda group: group is self._optionals):
            if shown := [action for action in group._group_actions if action not in without]:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(shown)
                formatter.end_section()
        if without:
            formatter.add_text(f"{counted(len(without), 'more option')}: {self.prog} --help-all")
        return formatter.format_help()

    def _short_usage(self) -> str:
        """Return the arguments that must be given."""
        needed = [action for action in self._actions if action.required and action.option_strings]
        places = [action for action in self._actions if not action.option_strings]
        words = [f"{action.option_strings[0]} {action.metavar}" for action in needed]
        words += [f"{action.metavar}" if action.required else f"[{action.metavar}]" for action in places]
        return " ".join(["%(prog)s", "[options]", *words])


class _HelpAll(argparse._HelpAction):
    """The argument that prints the help of all arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *more: object) -> NoReturn:
        assert isinstance(parser, _Parser)
        parser._print_message(parser.explain(), sys.stdout)
        parser.exit()


def command_line(named: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands with their arguments; where one is named, the others have no arguments."""
    parser = _Parser(
        prog="penstock",
        description="Compile an ONNX model into a multi-device pipeline bundle, train it, look into it.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    added = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        child = added.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        child.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
        if named in (None, name):
            command = cast(CommandModule, import_module(MODULES[name]))
            child.set_defaults(explained_by=child, run=command.run)
            command.add_arguments(child)
            if any(map(is_rare, child._actions)):
                child.add_argument("--help-all", action=_HelpAll, help="show all options, with those of rare use")
    return parser
