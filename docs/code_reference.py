"""Reference pages that come from the code: commands with their options, the Python interface, operations and passes in full, errors.

In: the argument parser, the names of `penstock`, the tables of operations and passes. Out: Markdown
for docs/refresh.py to put into pages."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

WIDTH = 100
# Classes that public functions hand out or take, besides those that `penstock` names itself: where they are, and what hands them out.
HANDED_OUT = {
    "Job": ("penstock.runtime.job.job", "what `penstock.open` gives"),
    "Step": ("penstock.runtime.messages.control", "what `Job.steps` gives for every update"),
    "RunSummary": ("penstock.runtime.job.run", "what `penstock.run_bundle` gives"),
    "Evaluation": ("penstock.runtime.messages.control", "what `Job.evaluate` gives"),
    "Device": ("penstock.ir.cluster.cluster", "a device of a `Cluster`"),
    "Link": ("penstock.ir.cluster.cluster", "a way between two devices of a `Cluster`"),
    "Host": ("penstock.ir.cluster.cluster", "a machine of a `Cluster`"),
    "Trace": ("penstock.inspection.traces.trace", "what `penstock.load_trace` gives"),
}


# Of what is only handed over it is said how it is made.
HANDED_OVER = ("Dump",)


def commands() -> str:
    """Every command with all arguments."""
    from penstock.commands.parser import command_line

    return "\n".join(
        part for name, parser in _subcommands(command_line()) for part in _command(f"penstock {name}", parser, 2)
    )


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _command(name: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}\n"
    yield f"{_prose(parser.description or '')}\n"
    words = [name]
    for group in parser._action_groups:
        positional = [action for action in group._group_actions if not action.option_strings]
        words += [_value(action) if action.required else f"[{_value(action)}]" for action in positional]
        words += [
            f"{action.option_strings[0]} {_value(action)}"
            for action in group._group_actions
            if action.option_strings and action.required
        ]
    if len(words) > 1:
        yield f"```text\nusage: {' '.join(words)}\n```\n"
    for group in parser._action_groups:
        rows = [action for action in group._group_actions if not _needless(action)]
        if not rows:
            continue
        if group.title not in ("positional arguments", "options"):
            yield f"*{_prose(group.title or '')}*\n"
        yield "".join(
            f"* `{_spelled(action)}`{': ' if action.help else ''}{_prose(action.help or '')}\n" for action in rows
        )
    for inner, sub in _subcommands(parser):
        yield from _command(f"{name} {inner}", sub, level + 1)


def _needless(action: argparse.Action) -> bool:
    """Whether every command has it, or the line with the command's name has said it all."""
    everywhere = isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.dest == "verbose"
    return everywhere or not (action.option_strings or action.help)


def _value(action: argparse.Action) -> str:
    if action.metavar is not None:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    return "|".join(map(str, action.choices)) if action.choices is not None else action.dest.upper()


def _spelled(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" [{_value(action)}]" if action.nargs == "?" else f" {_value(action)}"
    return f"{', '.join(action.option_strings)}{value}" if action.option_strings else _value(action)


def _prose(text: str) -> str:
    """Plain text as Markdown: what stands in quotes or braces is code, pages are links."""
    text = text.replace("%%", "%")
    text = "".join(
        part if i % 2 else re.sub(r"([*<])", r"\\\1", part) for i, part in enumerate(re.split(r"(`[^`]*`)", text))
    )
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)


def python() -> str:
    """Everything that `import penstock` offers, with what that hands out."""
    import penstock

    homes: dict[str, tuple[str, Any]] = {name: ("", getattr(penstock, name)) for name in penstock.__all__}
    functions = [name for name, (_, what) in homes.items() if inspect.isfunction(what)]
    classes = [name for name in homes if name not in functions]
    parts = ["## Functions\n", *(_function(name, homes[name][1], f"penstock.{name}", 3) for name in functions)]
    parts += ["## Classes\n", *(_class(name, homes[name][1], "") for name in classes)]
    parts += [
        "## Models to try things with\n",
        "Written by `penstock.models` as ONNX files; weights are drawn at random.\n",
    ]
    parts += [
        _function(name, what, f"penstock.models.{name}", 3)
        for name, what in vars(_imported("penstock.models")).items()
        if name.startswith("write_")
    ]
    parts += ["## What these hand out\n"]
    for name, (module, why) in HANDED_OUT.items():
        parts.append(_class(name, getattr(_imported(module), name), f"`{module}.{name}`: {why}."))
    return "\n".join(parts)


def _imported(name: str) -> ModuleType:
    from importlib import import_module

    return import_module(name)


def _class(name: str, what: type, home: str) -> str:
    parts = [f"### {name}\n"]
    if (
        name in HANDED_OVER
        or issubclass(what, (Exception, tuple))
        or dataclasses.is_dataclass(what)
        or hasattr(what, "__struct_fields__")
    ):
        parts.append(_code(_signature(name, inspect.signature(what), method=False)))
    if home:
        parts.append(f"{home}\n")
    doc = inspect.cleandoc(what.__doc__ or "")
    if not doc.startswith(f"{name}("):
        parts.append(f"{_described(doc)}\n")
    for member, value in _members(what) if name not in HANDED_OVER else ():
        if isinstance(value, property):
            parts.append(
                f"#### {name}.{member}\n\n{_code(f'{member}: {_returned(value.fget)}')}\n{_described(inspect.getdoc(value) or '')}\n"
            )
        else:
            alone = isinstance(value, (classmethod, staticmethod))
            parts.append(_function(f"{name}.{member}", value, f"{name}.{member}" if alone else member, 4))
    return "\n".join(parts)


def _members(what: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, as they stand in its source; what has no docstring is not meant for users."""
    for name, value in vars(what).items():
        called = isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)
        if called and not name.startswith("_") and inspect.getdoc(value):
            yield name, value


def _returned(function: Callable[..., Any] | None) -> str:
    assert function is not None
    return str(inspect.signature(function).return_annotation)


def _function(heading: str, what: Any, called: str, level: int) -> str:
    function = what.__func__ if isinstance(what, (classmethod, staticmethod)) else what
    method = level > 3 and not isinstance(what, staticmethod)
    text = _code(_signature(called, inspect.signature(function), method))
    return f"{'#' * level} {heading}\n\n{text}\n{_described(inspect.getdoc(function) or '')}\n"


def _signature(name: str, signature: inspect.Signature, method: bool) -> str:
    """A call as a programmer would write its definition, one argument a line where it is long."""
    words, star = [], False
    for parameter in list(signature.parameters.values())[1 if method else 0 :]:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        words.append(f"{mark}{parameter.name}{kind}{_default(parameter, kind)}")
    result = (
        ""
        if signature.return_annotation in (signature.empty, None, "None")
        else f" -> {_type(signature.return_annotation)}"
    )
    line = f"{name}({', '.join(words)}){result}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){result}"


def _default(parameter: inspect.Parameter, kind: str) -> str:
    if parameter.default is parameter.empty:
        return ""
    # A default that is made anew in every call has no text of its own.
    text = (
        "..."
        if "<factory>" in repr(parameter.default) or " at 0x" in repr(parameter.default)
        else repr(parameter.default)
    )
    return f" = {text}" if kind else f"={text}"


def _type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _described(doc: str) -> str:
    """A docstring: paragraphs as prose, what is indented or set in columns as it stands."""
    parts = []
    for part in doc.strip().split("\n\n"):
        set_apart = any(re.match(r" |\S.*?\S {2,}\S", line) for line in part.splitlines())
        parts.append(f"```text\n{part}\n```" if set_apart else _prose(part))
    return "\n\n".join(parts)


def operations() -> str:
    """Every operation with its attributes, which of its dimensions may be split, and what partial sums pass through."""
    from penstock.ir.ops import OPS, Required
    from penstock.ir.text import print_literal

    types = {bool: "bool", int: "int", float: "float", str: "word", tuple: "list", object: "any"}
    lines = ["| op | attributes | dimensions | partial sums |\n", "| --- | --- | --- | --- |\n"]
    for name, row in OPS.items():
        attributes = [
            f"`{attribute}: {types[spec.kind]}`"
            if isinstance(spec, Required)
            else f"`{attribute}={print_literal(spec)}`"
            for attribute, spec in row.attrs.items()
        ]
        state = "as its variable" if row.family == "state" else "all alike"
        dimensions = f"`{row.dims}`" if row.dims else state
        passed = f"`{row.linear}`" if row.linear else ""
        lines.append(f"| `{name}` | {' '.join(attributes)} | {dimensions} | {passed} |\n")
    return "".join(lines)


def passes() -> str:
    """Every pass with all that `penstock passes PASS` says."""
    from penstock.inspection.reference.passes import pass_help
    from penstock.passes.pipelines import PASSES

    return "\n".join(
        f"## {name}\n\n```text\n{chr(10).join(line.rstrip() for line in pass_help(name))}\n```\n" for name in PASSES
    )


def errors() -> str:
    """The errors that a user can meet, by the exit codes of the command line."""
    from penstock.support import errors

    kinds = [what for what in vars(errors).values() if inspect.isclass(what) and issubclass(what, errors.PenstockError)]
    lines = ["| exit code | error | means |\n", "| --- | --- | --- |\n", "| 0 | | all went well |\n"]
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        lines.append(
            f"| {kind.exit_code} | `{kind.__name__}` | {inspect.cleandoc(kind.__doc__ or '').splitlines()[0]} |\n"
        )
    return "".join(lines)
