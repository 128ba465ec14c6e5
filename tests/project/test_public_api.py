"""Tests that the public interface (docs/stability.md) changes only on purpose: names, signatures and options are those
of public_api.txt.

`python tests/project/test_public_api.py` writes that file anew; a change of it belongs into the changelog.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import penstock
from penstock import models
from penstock.commands.parser import command_line
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import RunSummary
from penstock.runtime.telemetry.steps import Step

FILE = Path(__file__).resolve().parents[1] / "public_api.txt"
# What functions of the public API give back, beside the classes that are named in it.
GIVEN_BACK = (Job, Step, RunSummary)
# Classes that are made to be handed to functions of the public API: what these do with them is not public.
HANDED_OVER = (penstock.Dump,)


def _signature(value: Callable[..., object]) -> str:
    """Types without the quotes that postponed annotations have."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))


def _told_class(name: str, kind: type) -> Iterator[str]:
    """Its constructor and its public members, those of our own bases included."""
    yield f"class {name}{_signature(kind)}"
    if kind in HANDED_OVER:
        return
    bases = [base for base in kind.__mro__ if base.__module__.startswith("penstock.")]
    members = {
        member: value for base in reversed(bases) for member, value in vars(base).items() if not member.startswith("_")
    }
    for member, value in sorted(members.items()):
        if isinstance(value, property | cached_property):
            yield f"  {name}.{member} -> {inspect.signature(value.fget if isinstance(value, property) else value.func).return_annotation}"
        elif inspect.isroutine(value):
            yield f"  {name}.{member}{_signature(getattr(kind, member))}"


def _told_function(name: str, value: object) -> Iterator[str]:
    assert callable(value), f"{name} is neither a class nor a function"
    yield f"def {name}{_signature(value)}"


def _told_command(words: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Arguments with what they take; the order of options is of no meaning."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in sorted(action.choices.items()):
                yield from _told_command(f"{words} {name}", below)
        elif not isinstance(action, argparse._HelpAction):
            taken = (
                f"{{{','.join(map(str, action.choices))}}}"
                if action.choices
                else ""
                if action.nargs == 0
                else action.metavar or action.dest
            )
            needed = " (required)" if action.option_strings and action.required else ""
            found.append(f"{words} {' '.join([*action.option_strings, str(taken)])}".rstrip() + needed)
    yield from sorted(found)


def public() -> list[str]:
    """A line for everything that is public."""
    lines = []
    for name in sorted(penstock.__all__):
        value = getattr(penstock, name)
        lines += _told_class(f"ps.{name}", value) if isinstance(value, type) else _told_function(f"ps.{name}", value)
    for name, value in sorted(vars(models).items()):
        if name.startswith("write_"):
            lines += _told_function(f"penstock.models.{name}", value)
    for kind in GIVEN_BACK:
        lines += _told_class(kind.__name__, kind)
    return lines + list(_told_command("penstock", command_line()))


def _changes(pinned: list[str], found: list[str]) -> list[str]:
    gone = [f"- {line}" for line in pinned if line not in found]
    return gone + [f"+ {line}" for line in found if line not in pinned]


def test_the_public_api_is_the_one_that_was_announced() -> None:
    changes = _changes(FILE.read_text(encoding="utf-8").splitlines(), public())
    assert not changes, "\n".join(
        [
            "the public API is not that of tests/public_api.txt:",
            *changes,
            "If that is meant: read docs/stability.md on what may change, say it in CHANGELOG.md, and run `python tests/project/test_public_api.py`.",
        ]
    )


def test_a_changed_api_is_noticed() -> None:
    """The control: another name, another default, an option that is gone."""
    pinned, found = public(), public()
    at = next(i for i, line in enumerate(found) if line.startswith("def ps.plan("))
    assert "schedule: str = '1f1b'" in found[at]
    found[at] = found[at].replace("'1f1b'", "'gpipe'")
    gone = found.pop(found.index(next(line for line in found if line.startswith("penstock run --data"))))
    found.append("def ps.another()")
    assert _changes(pinned, found) == [f"- {pinned[at]}", f"- {gone}", f"+ {found[at]}", "+ def ps.another()"]


def test_all_names_are_typed_and_told() -> None:
    """Whoever reads `help(penstock.NAME)` finds what it is, and a checker of types what goes in and comes out."""
    assert sorted(penstock.__all__) == sorted(set(penstock.__all__))
    written = {f"models.{name}": value for name, value in vars(models).items() if name.startswith("write_")}
    assert len(written) >= 5
    for name, value in [*((name, getattr(penstock, name)) for name in penstock.__all__), *written.items()]:
        assert inspect.getdoc(value), f"ps.{name} has no docstring"
        signature = inspect.signature(value)
        assert all(given.annotation is not inspect.Parameter.empty for given in signature.parameters.values()), (
            f"ps.{name} is not typed"
        )
    assert set(penstock.__all__) <= set(dir(penstock))


if __name__ == "__main__":
    FILE.write_text("\n".join(public()) + "\n", encoding="utf-8")
