"""The pass manager: parse pipeline text, check facts, run passes, verify after each one, and report each step to a
watcher.

A pipeline is written `simplify,partition{stages=4},weight-versions`, in a file perhaps over many lines and with
comments. Options are the fields of the pass's frozen dataclass, and `str(call)` prints only those that differ from
their defaults.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol

from penstock.ir.attrs import Attr, parse_literal, print_literal
from penstock.ir.graph import Module
from penstock.ir.verify.verifier import verify
from penstock.support.errors import PenstockError, UsageError
from penstock.support.words import itemised, meant


@dataclass(frozen=True, slots=True)
class Pass:
    """A row of the pass table. `needs` and `gives` are facts; `options` is a frozen dataclass."""

    name: str
    run: Callable[[Module, Any], Module]
    options: type
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    @property
    def doc(self) -> str:
        return " ".join((self.run.__doc__ or "").split("\n\n")[0].split())


@dataclass(frozen=True, slots=True)
class Call:
    """One pass with its options, as it stands in a pipeline."""

    name: str
    options: Any

    def __str__(self) -> str:
        changed = [
            f"{f.name}={_print_option(getattr(self.options, f.name))}"
            for f in fields(self.options)
            if f.default is MISSING or getattr(self.options, f.name) != f.default
        ]
        return self.name + (f"{{{','.join(changed)}}}" if changed else "")


_BARE = re.compile(r"[\w.\-]+")


def _print_option(value: Attr) -> str:
    """Print the value of an option. Strings that cannot be misread stand without quotes, as in `kind=2bw`, although
    that is no word of the IR text."""
    return value if isinstance(value, str) and _BARE.fullmatch(value) else print_literal(value)


_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*')
_CALL = re.compile(
    r"\s*([a-z][\w\-]*)[^\S\n]*(?:\{((?:[^}\"]|\"(?:[^\"\\]|\\.)*\")*)\})?(?:\s*,\s*|[^\S\n]*\n\s*|\s*$)"
)
_OPTION = re.compile(r'\s*([\w\-]+)=("(?:[^"\\]|\\.)*"|\[(?:[^\]"]|"(?:[^"\\]|\\.)*")*\]|[^,]*)\s*(?:,|$)')


def parse_pipeline(text: str, table: dict[str, Pass], where: str = "-p") -> list[Call]:
    """Parse the calls that print as `text`. A line end may stand for a comma, and `//` begins a comment.

    One UsageError lists every unknown pass and option; `where` says where the text is from.
    """
    calls: list[Call] = []
    problems: list[str] = []
    # Blanks in place of comments keep all positions, for messages.
    plain = _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else " " * len(m[0]), text)
    lines = "\n" in text
    at = len(plain) - len(plain.lstrip())
    while at < len(plain):
        match = _CALL.match(plain, at)
        line = f"line {plain.count(chr(10), 0, at) + 1}: " if lines else ""
        if match is None:
            excerpt = plain[at : at + 60].partition("\n")[0].rstrip()
            raise UsageError(
                f"{line}cannot read the pipeline at {excerpt!r}, "
                "expected pass{option=value,...} separated by commas or line ends",
                where=where,
            )
        at = match.end()
        call_problems: list[str] = []
        if match[1] in table:
            calls += _parse_call(table[match[1]], match[2] or "", call_problems)
        else:
            call_problems.append(
                f"unknown pass {match[1]!r}, {meant(match[1], table) or 'expected one of ' + ', '.join(table)}"
            )
        problems += [line + problem for problem in call_problems]
    problems += _disagreements(calls)
    if problems:
        raise UsageError("the pipeline has problems:" + itemised(problems), where=where)
    return calls


# Options that are one number of the whole pipeline: one pass divides gradients by it, another adds them up that often.
_SHARED_OPTIONS = ("microbatches",)


def _disagreements(calls: Sequence[Call]) -> Iterator[str]:
    for name in _SHARED_OPTIONS:
        values = {call.name: getattr(call.options, name) for call in calls if hasattr(call.options, name)}
        if len(set(values.values())) > 1:
            yield f"{name} must be one number in all passes: " + ", ".join(
                f"{n} has {value}" for n, value in values.items()
            )


def _parse_call(row: Pass, text: str, problems: list[str]) -> Iterator[Call]:
    known = {f.name: f for f in fields(row.options)}
    values: dict[str, Attr] = {}
    at = 0
    before = len(problems)
    while at < len(text):
        match = _OPTION.match(text, at)
        if match is None:
            problems.append(f"{row.name}: cannot read options at {text[at:]!r}, expected name=value")
            break
        at = match.end()
        name = match[1].replace("-", "_")
        if name not in known:
            problems.append(f"{row.name}: unknown option {match[1]!r}, it has {', '.join(known) or 'none'}")
            continue
        try:
            word = match[2].strip()
            # Names may start with a digit, as schedules 1f1b and 2bw do: in the IR text they are quoted, here they need
            # not be.
            plain = type(known[name].default) is str and re.fullmatch(r"\d+[A-Za-z_][\w\-]*", word)
            values[name] = word if plain else parse_literal(word)
        except ValueError as error:
            problems.append(f"{row.name}: option {name}: {error}")
    missing = [n for n, f in known.items() if n not in values and f.default is MISSING]
    problems += [f"{row.name}: option {n} is missing" for n in missing]
    for name, value in values.items():
        default = known[name].default
        if default is not MISSING and default is not None:
            if type(default) is float and type(value) is int:
                values[name] = float(value)
            elif type(default) is not type(value):
                problems.append(
                    f"{row.name}: option {name} must be {type(default).__name__}, got {print_literal(value)}"
                )
    if len(problems) == before:
        yield Call(row.name, row.options(**values))


def print_pipeline(calls: Iterable[Call]) -> str:
    return ",".join(map(str, calls))


def count_ops(module: Module) -> int:
    return sum(len(g.ops) for g in module.graphs.values())


@dataclass(frozen=True, slots=True)
class Event:
    """The record of one pass that ran. `started` is a time of `time.perf_counter`; `ms` includes the verifier;
    `remaining` is the pipeline that goes on from there."""

    number: int
    call: str
    started: float
    ms: float
    ops_before: int
    ops_after: int
    changed: bool
    remaining: str


class Watcher(Protocol):
    """An observer of every step of a pipeline. penstock.inspection.dump writes the steps to files."""

    def begin(self, module: Module, calls: str) -> None:
        """Announce a pipeline, which is to run these passes."""

    def passed(self, event: Event, name: str, before: Module, after: Module) -> None: ...

    def failed(self, module: Module, call: Call, error: Exception) -> None:
        """Report that a pass, or the verifier after it, refused; `module` is the input of the pass."""


def run_passes(
    module: Module,
    calls: Sequence[Call],
    table: dict[str, Pass],
    *,
    dump: Watcher | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    before: Callable[[Call, Module], Call] | None = None,
) -> Module:
    """Run a pipeline. After every pass the facts held so far are checked again; an error names the pass.

    `before` sees each module on its way into a pass, and returns the call to make.
    """
    if dump is not None:
        dump.begin(module, print_pipeline(calls))
    verify(module)
    for index, call in enumerate(calls):
        if progress is not None:
            progress(index, len(calls), call.name)
        if before is not None:
            call = before(call, module)
        row = table[call.name]
        started = time.perf_counter()
        try:
            after = _run_one(module, call, row, table)
        except Exception as error:
            if dump is not None:
                dump.failed(module, call, error)
            if isinstance(error, PenstockError) and not error.where.startswith("pass "):
                error.where = f"pass {call.name}" + (f": {error.where}" if error.where else "")
            raise
        if dump is not None:
            remaining, seconds = print_pipeline(calls[index + 1 :]), time.perf_counter() - started
            event = Event(
                index + 1,
                str(call),
                started,
                seconds * 1e3,
                count_ops(module),
                count_ops(after),
                after is not module,
                remaining,
            )
            dump.passed(event, call.name, module, after)
        module = after
    if progress is not None:
        progress(len(calls), len(calls), "done")
    return module


def _run_one(module: Module, call: Call, row: Pass, table: dict[str, Pass]) -> Module:
    for fact in row.needs:
        if fact not in module.facts:
            givers = [p.name for p in table.values() if fact in p.gives]
            raise UsageError(
                f"pass {row.name} needs the fact '{fact}', which the module does not have",
                hint=f"run {' or '.join(givers)} before it",
            )
    after = row.run(module, call.options)
    new = tuple(f for f in row.gives if f not in after.facts)
    if new:
        after = after.but(facts=after.facts + new)
    if after is not module:
        verify(after)
    return after
