"""Tests of the table of action kinds: the facts that follow from it, and the missing entries in dictionaries of
consumers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping

import pytest
from oracles.repository import ROOT

from penstock.inspection.dump import program as dumping
from penstock.inspection.report import schedule_facts
from penstock.inspection.views import gantt, schedule_grid
from penstock.ir import grid as simulate
from penstock.ir.action_kinds import ACTION_KINDS, ActionKind, adder
from penstock.ir.interpreter import schedules as interp
from penstock.ir.memory import touches as accesses
from penstock.ir.memory import walk as memory_walk
from penstock.ir.schedule import BATCH_ORDER, COMPUTE, KINDS, PHASES, TAKERS, Action
from penstock.ir.verify import messages as verify_messages
from penstock.ir.verify import schedules as verify_schedule
from penstock.ir.verify import verifier as verify
from penstock.passes.simulator import simulate as simulator
from penstock.runtime.messages import status
from penstock.runtime.worker import executor

# Where kinds are compared; files beside these folders hold commands, which leave kinds to them.
JUDGED = (
    "ir",
    "passes",
    "backends",
    "runtime",
    *(f"src/penstock/{name}" for name in ("planning", "calibration", "inspection", "verification")),
)


def every(row: ActionKind) -> bool:
    return True


def shown(row: ActionKind) -> bool:
    """A drop takes no time."""
    return row.does != "drops"


# What each consumer says by kind, and of which rows it must say something.
CONSUMERS: dict[str, tuple[Collection[str], Callable[[ActionKind], bool]]] = {
    "interpreter": (interp.MEANINGS, every),
    "player": (simulate.MEETINGS, every),
    "grid": (schedule_grid.GRID, every),
    "memory walk": (memory_walk.WALKS, every),
    "accesses": (accesses.TOUCHED, every),
    "verifier of effects": (verify.EFFECTS, lambda row: row.computes),
    "verifier of schedules": (verify_schedule.ORDERED, every),
    "verifier of messages": (verify_messages.ENDS, every),
    "simulator": (simulator.CODES, every),
    "executor": (executor.HANDLERS, every),
    "status": (status.WORDS, every),
    "pictures": (gantt.COLOURS, lambda row: row.computes),
    "report": (schedule_facts.KINDS, shown),
    "dump": (dumping.DOES, every),
}


def holes(table: Mapping[str, ActionKind]) -> Iterator[str]:
    for name, (known, judged) in CONSUMERS.items():
        expected = {kind for kind, row in table.items() if judged(row)}
        yield from (f"{name}: nothing on {kind}" for kind in sorted(expected - {*known}))
        yield from (f"{name}: {kind} is not expected" for kind in sorted({*known} - expected))


def test_every_consumer_knows_every_kind() -> None:
    assert not list(holes(ACTION_KINDS))


def test_a_row_that_no_consumer_knows_is_a_hole_in_all_of_them() -> None:
    computing = ActionKind("X", "computes something new", "microbatch", "computes", "X", "something new")
    assert list(holes({**ACTION_KINDS, "X": computing})) == [f"{name}: nothing on X" for name in CONSUMERS]
    missing = {kind: row for kind, row in ACTION_KINDS.items() if kind != "AR"}
    assert "interpreter: AR is not expected" in holes(missing)


def test_rows_agree_with_each_other() -> None:
    for name, row in ACTION_KINDS.items():
        assert row.name == name
        assert row.meaning
        assert {*row.takes, *row.saved_by, row.after, row.part_of, row.phase, row.partner} <= {*KINDS, ""}
        assert row.computes == (row.phase == name)
        assert bool(row.phase) == bool(row.words)
        assert (row.does in ("sends", "receives", "hands on")) == bool(row.partner)
        if row.partner:
            partner = ACTION_KINDS[row.partner]
            assert partner.partner == name or row.does == "hands on"
            assert partner.does != row.does
            assert (partner.phase, partner.per) == (row.phase, row.per)
            assert row.per == ACTION_KINDS[row.phase].per
        assert all(ACTION_KINDS[kind].computes for kind in (*row.takes, *row.saved_by))
        # An action of a microbatch saves for the microbatch, and makes no version.
        assert row.per == "microbatch" or not (row.saved_by or row.after or row.way or row.versions == "reads")


def test_the_tuples_are_those_of_the_text_of_the_ir() -> None:
    """Dumps and bundles name kinds, and write some as their number."""
    assert (
        *"FRBWPNU",
        "SF",
        "RF",
        "SB",
        "RB",
        "SP",
        "RP",
        "SN",
        "RN",
        "AR",
        "L",
        "D",
        "CI",
        "CO",
        "HF",
        "HB",
        "HP",
        "HN",
        "SU",
        "RU",
    ) == KINDS
    assert tuple("FRBWPNU") == COMPUTE
    assert PHASES == ("F", "B", "P", "N", "U")
    assert TAKERS == {"F": ("F",), "B": ("B",), "P": ("N", "U"), "N": ("U",), "U": ("U",)}
    assert BATCH_ORDER == ("AR", "P", "N", "U")


@pytest.mark.parametrize("kind", KINDS)
def test_the_pattern_reads_every_kind(kind: str) -> None:
    row = ACTION_KINDS[kind]
    moves = bool(row.partner)
    for item in {"": ("",), "may": ("", "o"), "must": ("o",)}[row.item]:
        action = Action(kind, 1, 3, None, 2 if moves else None, item=item)
        assert Action.parse(str(action)) == action
        assert action.once == (row.per == "batch" or item == "o")
    wrong = f"1{kind}3" if row.item == "must" else f"1{kind}3{row.arrow}{2 if moves else ''}:{'' if row.item else 'o'}"
    with pytest.raises(ValueError, match="bad action"):
        Action.parse(wrong)
    with pytest.raises(ValueError, match="bad action"):
        Action.parse(f"1{kind}3" if moves else f"1{kind}3>2")


def test_the_computation_that_adds_to_gradients() -> None:
    assert (adder(("F", "B", "U")), adder(("F", "B", "W"))) == ("B", "W")


def literal_comparisons(source: str) -> list[int]:
    """Lines in which the kind of an action is compared with a literal, or looked up in a dictionary of literals."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if any(map(_is_kind, _compared(node)))]


def _compared(node: ast.AST) -> Iterator[ast.expr]:
    """The literals beside a kind."""
    if isinstance(node, ast.Compare) and any(map(_names_kind, (node.left, *node.comparators))):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Match) and _names_kind(node.subject):
        for case in node.cases:
            yield from (part.value for part in ast.walk(case.pattern) if isinstance(part, ast.MatchValue))
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and isinstance(node.func.value, ast.Dict)
        and any(map(_names_kind, node.args))
    ):
        yield from (key for key in node.func.value.keys if key is not None)


def _names_kind(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(_names_kind, node.elts))
    return (isinstance(node, ast.Attribute) and node.attr in ("kind", "phase")) or (
        isinstance(node, ast.Name) and node.id in ("kind", "phase")
    )


def _is_kind(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_kind, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KINDS


def test_no_kind_is_compared_with_a_literal() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in JUDGED
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in literal_comparisons(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "action.kind == 'AR'",
        "a.kind in ('B', 'W')",
        "kind != 'U'",
        "(a.kind, a.stage) == ('F', 1)",
        "edge.phase == 'F'",
        "{'F': 1, 'B': -1}.get(a.kind, 0)",
        "match a.kind:\n    case 'SF' | 'SB':\n        pass",
    ],
)
def test_a_literal_is_found(source: str) -> None:
    assert literal_comparisons(source)
