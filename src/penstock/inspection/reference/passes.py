"""`penstock passes`: all passes in short, one in full, or a pipeline as a file.

In: the table of passes and the pipelines. Out: text.
"""

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
    """Yield all passes with their options, two lines each."""
    for row in PASSES.values():
        facts = [f"{word} {', '.join(names)}" for word, names in (("needs", row.needs), ("gives", row.gives)) if names]
        yield _signature(row) + (f"  [{'; '.join(facts)}]" if facts else "")
        yield f"    {row.doc}"


def known(name: str, names: Iterable[str], what: str, command: str) -> str:
    """Return the name as the table spells it; `-` and `_` are the same. `command` lists the names."""
    by_spelling = {spelled.replace("_", "-"): spelled for spelled in names}
    if (spelled := by_spelling.get(name.replace("_", "-"))) is not None:
        return spelled
    raise UsageError(
        f"there is no {what} {name!r}", hint=meant(name, by_spelling.values()) or f"`{command}` lists those there are"
    )


def _signature(row: Pass) -> str:
    options = (f.name if f.default is MISSING else f"{f.name}={_default(f)}" for f in fields(row.options))
    return f"{row.name}{{{','.join(options)}}}"


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "must be given"
    # The default None means that the pass chooses the value.
    return "none" if field.default is None else print_literal(field.default)


def pass_help(name: str) -> Iterator[str]:
    """Yield the lines of help for a pass."""
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
                condition = f", with {entry.condition}" if entry.condition else ""
                yield f"in {pipeline}, between {before} and {after}{condition}: {entry.why}"


def _type_name(field: Field[Any]) -> str:
    """Return the type of a field in the words of the IR text."""
    text = str(field.type).replace(" | None", "")
    match = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", text)
    return f"list of {match[1]}" if match else text


def fact_meanings() -> dict[str, str]:
    """Return, for each fact, the verifier's description of its check."""
    rows = re.findall(r"^ {4}(\w+) {2,}(.+)$", verify.__doc__ or "", re.MULTILINE)
    return dict(rows)
