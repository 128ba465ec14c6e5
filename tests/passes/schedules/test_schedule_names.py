"""Tests that there is one list of schedules, and that code reads the row of a schedule instead of comparing its
name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from oracles.repository import ROOT

from penstock.ir.schedule_names import ALL_SYNCHRONOUS, DELAYED, INFERENCE, NAMES, PACKED, SYNCHRONOUS, TRAINING
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES

FOLDERS = ("ir", "frontends", "passes", "backends", "runtime", "src/penstock")
# The rows of schedules, and the list of names.
EXEMPT = ("passes/schedules/", "ir/schedule_names.py")
# Of a pass over a network, and of a padding.
WORDS = {INFERENCE, "wrap"}
# So many names in one tuple are a second list of schedules.
LIST = 3


def test_the_table_has_the_names_of_the_list() -> None:
    assert tuple(SCHEDULES) == NAMES == (*TRAINING, INFERENCE)
    assert tuple(name for name, kind in SCHEDULES.items() if kind.trains) == TRAINING
    assert tuple(name for name, kind in (*SCHEDULES.items(), *PACK_SCHEDULES.items()) if kind.delay) == DELAYED
    assert sorted((*ALL_SYNCHRONOUS, *DELAYED)) == sorted((*TRAINING, *PACKED))
    assert [name for name in ALL_SYNCHRONOUS if name in TRAINING] == list(SYNCHRONOUS)
    assert tuple(PACK_SCHEDULES) == PACKED


def problems(source: str) -> Iterator[tuple[int, str]]:
    """Lines in which a schedule's name is compared, or which list schedules a second time."""
    if not any(name in source for name in (*NAMES, *PACKED, "INFERENCE")):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(map(_is_name, (node.left, *node.comparators))):
            if _about_schedules(node):
                yield node.lineno, "compares the name of a schedule"
        elif isinstance(node, ast.MatchValue) and _is_name(node.value):
            yield node.value.lineno, "matches the name of a schedule"
        elif isinstance(node, ast.Dict) and any(key is not None and _is_training(key) for key in node.keys):
            yield node.lineno, "looks something up by the name of a schedule"
        elif isinstance(node, ast.Tuple | ast.List | ast.Set) and sum(map(_is_training, node.elts)) >= LIST:
            yield node.lineno, "lists schedules a second time"


def _is_training(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (*TRAINING, *PACKED)


def _is_name(node: ast.expr) -> bool:
    """A name, the constant of the one for inference, or several names."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_name, node.elts))
    if isinstance(node, ast.Name):
        return node.id == "INFERENCE"
    return isinstance(node, ast.Constant) and node.value in (*NAMES, *PACKED)


def _about_schedules(node: ast.Compare) -> bool:
    """Some names are words of other things, too: there the comparison has to name a schedule."""
    names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return not names.isdisjoint({*TRAINING, *PACKED} - WORDS) or "schedule" in ast.unparse(node)


def test_no_name_is_compared_outside_the_table() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(EXEMPT)
        for line, what in problems(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "schedule == '2bw'",
        "kind.schedule == 'wrap'",
        "'1f1b' != plan.schedule",
        "self.schedule in ('1f1b', 'gpipe')",
        "plan.schedule == 'forward'",
        "schedule.name is INFERENCE",
        "{'2bw': 2, 'gpipe': 1}.get(schedule)",
        "match schedule:\n    case 'zb-1f1b':\n        pass",
        "KINDS = ('1f1b', 'gpipe', '2bw')",
        "{'zb-v': 2}[schedule]",
    ],
)
def test_a_comparison_is_found(source: str) -> None:
    assert list(problems(source))


@pytest.mark.parametrize(
    "source", ["direction == 'forward'", "mode == 'wrap'", "plan(schedule='2bw')", "row = {'forward': 1}"]
)
def test_other_uses_of_the_words_are_left_alone(source: str) -> None:
    assert not list(problems(source))
