"""`penstock passes`: all passes in short, one in full, or a pipeline as a file. In: the table of passes and the pipelines. Out: text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from penstock.ir.attrs import print_literal
from penstock.ir.verify import verifier as verify
from penstock.passes.manager import Pass
from penstock.passes.pipelines import PASSES, PIPELINES
from penstock.support.errors import UsageError
from penstock.support.terminal import table
from penstock.support.words import meant


def list_passes() -> Iterator[str]:
    """All passes with their options, two lines each."""
    for row in PASSES.values():
        facts = [f"{word} {', '.join(names)}" for word, names in (("needs", row.needs), ("gives", row.gives)) if names]
        yield _signature(row) + (f"  [{'; '.join(facts)}]" if facts else "")
        yield f"    {row.doc}"


def known(name: str, names: Iterable[str], what: str, command: str) -> str:
    """The name, if there is such a one; `-` and `_` are the same. `command` lists them."""
    spelled = {one.replace("_", "-"): one for one in names}
    if (one := spelled.get(name.replace("_", "-"))) is not None:
        return one
    raise UsageError(
        f"there is no {what} {name!r}", hint=meant(name, spelled.values()) or f"`{command}` lists those there are"
    )


def _signature(row: Pass) -> str:
    return f"{row.name}{{{','.join(f.name if f.default is MISSING else f'{f.name}={_default(f)}' for f in fields(row.options))}}}"


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "must be given"
    # A setting that is None is not given: the pass finds it.
    return "none" if field.default is None else print_literal(field.default)


def pass_help(name: str) -> Iterator[str]:
    """All there is to say about a pass."""
    row = PASSES[name]
    yield _signature(row)
    yield f"    {row.doc}"
    module = inspect.getmodule(row.run)
    if module is not None and module.__doc__:
        yield ""
        yield inspect.cleandoc(module.__doc__)
    yield ""
    rows = [[f.name, _type_name(f), _default(f)] for f in fields(row.options)]
    yield table(["option", "type", "default"], rows) if rows else "no options"
    if rows and row.options.__doc__:
        yield inspect.cleandoc(row.options.__doc__)
    yield ""
    meanings = fact_meanings()
    for word, facts in (("needs", row.needs), ("gives", row.gives)):
        for fact in facts:
            givers = [p.name for p in PASSES.values() if fact in p.gives]
            source = f" (from {' or '.join(givers)})" if word == "needs" else ""
            yield f"{word} {fact}{source}: {meanings[fact]}"
    for pipeline, (_, entries) in PIPELINES.items():
        names = ["the beginning", *(entry.name for entry in entries()), "the end"]
        for entry, (before, after) in zip(entries(), zip(names, names[2:], strict=False), strict=False):
            if entry.name == name:
                asked = f", with {entry.asked}" if entry.asked else ""
                yield f"in {pipeline}, between {before} and {after}{asked}: {entry.why}"


def _type_name(field: Field[Any]) -> str:
    """The annotation in words of the text form."""
    text = str(field.type).replace(" | None", "")
    listed = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", text)
    return f"list of {listed[1]}" if listed else text


def fact_meanings() -> dict[str, str]:
    """What the verifier checks for each fact, in its own words."""
    rows = re.findall(r"^ {4}(\w+) {2,}(.+)$", verify.__doc__ or "", re.MULTILINE)
    return dict(rows)
