"""The structural difference of two modules: nothing exactly where they print alike, and what passes really did."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.drawn_modules import modules
from oracles.repository import ROOT

from penstock.inspection.diff import differences
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import TensorType

VECTOR = TensorType("f32", (4,))


def changed(a: Module, b: Module) -> list[str]:
    return list(differences(a, b))


@given(modules(), modules(), st.data())
@settings(max_examples=40, deadline=None)
def test_there_is_a_difference_exactly_where_the_text_differs(a: Module, b: Module, data: st.DataObject) -> None:
    assert not changed(a, parse_module(print_module(a)))
    # One part of another module, or another order of the same.
    field = data.draw(
        st.sampled_from(
            ["name", "facts", "inputs", "outputs", "vars", "graphs", "stages", "schedule", "notes", "cluster"]
        )
    )
    value = getattr(b, field)
    if data.draw(st.booleans()) and isinstance(getattr(a, field), tuple):
        value = tuple(data.draw(st.permutations(getattr(a, field))))
    mixed = replace(a, **{field: value})
    assert bool(changed(a, mixed)) == (print_module(a) != print_module(mixed))


def add(name: str, *ins: Value, **attrs: object) -> Op:
    return Op("add", ins, (Value(name, VECTOR),), attrs)  # type: ignore[arg-type]


def module_of(**graphs: list[Op]) -> Module:
    x = Value("x", VECTOR)
    made = {name: Graph(name, (x,), ops[-1].outs, tuple(ops)) for name, ops in graphs.items()}
    return Module("m", inputs=(x,), graphs=made)


def test_operations_are_compared_by_name_wherever_they_stand() -> None:
    x = Value("x", VECTOR)
    a, b, c = add("a", x, x), add("b", x, x), add("c", x, x)
    assert changed(module_of(f=[a, b, c]), module_of(f=[b, a, c])) == ["~ graph @f", "  ~ 1 operation in another place"]
    assert changed(module_of(f=[a, b, c]), module_of(f=[a, add("b", x, x, kernel="k0"), c])) == [
        "~ graph @f",
        "  ~ %b : f32[4] = add(%x, %x{+, kernel=k0+})",
    ]
    assert changed(module_of(f=[a, b, c]), module_of(f=[a, c])) == ["~ graph @f", "  - %b : f32[4] = add(%x, %x)"]
    # To Python these attributes are equal.
    for old, new in ((True, 1), (0.0, -0.0)):
        assert len(changed(module_of(f=[add("a", x, k=old)]), module_of(f=[add("a", x, k=new)]))) == 2


def test_a_graph_that_was_cut_is_not_listed_again() -> None:
    x = Value("x", VECTOR)
    ops = [add(f"v{i}", x, x, stage=i // 6) for i in range(12)]
    parts = [[op.with_attrs(stage=None) for op in ops[i : i + 6]] for i in (0, 6)]
    lines = changed(module_of(main=ops), module_of(f0=parts[0], f1=parts[1]))
    assert [line for line in lines if "operations" in line] == [
        "  > 6 operations now in @f0",
        "  > 6 operations now in @f1",
        "  < 6 operations before in @main",
        "  ~ 6 operations, %v0 to %v5: [-, stage=0-]",
        "  < 6 operations before in @main",
        "  ~ 6 operations, %v6 to %v11: [-, stage=1-]",
    ]
    assert len(lines) == 15


def test_operations_in_their_places_go_by_their_names_too() -> None:
    """As many operations before and after: what stands where another stood is still not it."""
    x = Value("x", VECTOR)
    a, b, last = add("a", x, x), add("b", x, x), add("last", x, x)
    take, accum, other = (
        Op(kind, (x,), (), {"var": var}) for kind, var in (("take", "v"), ("accum", "v"), ("accum", "w"))
    )
    renamed = [line[2:5] for line in changed(module_of(f=[a, last]), module_of(f=[b, last]))[1:]]
    assert renamed == ["- %", "+ %"]
    for was, now in ((take, accum), (accum, other)):
        lines = changed(module_of(f=[was, last]), module_of(f=[now, last]))
        assert [line[2] for line in lines[1:]] == ["-", "+"]
    # The control: what has the name and the place of what stood there has changed.
    assert changed(module_of(f=[accum, last]), module_of(f=[accum.with_attrs(kernel="k0"), last]))[1:] == [
        "  ~ accum(%x, @v{+, kernel=k0+})"
    ]


@pytest.mark.parametrize("folder", ["goldens", "goldens_bf16", "goldens_zb"])
def test_steps_of_real_pipelines(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted((ROOT / "tests" / "passes" / folder).glob("[0-9]*.ir"))
    assert len(files) > 6
    parsed = [parse_module(path.read_text(encoding="utf-8"), path.name) for path in files]
    for before, after in pairwise(parsed):
        lines = changed(before, after)
        # Operations that stand in their places are found by their names as well.
        with monkeypatch.context() as patched:
            patched.setattr("penstock.inspection.diff._in_place", lambda a, b: None)
            assert changed(before, after) == lines
        one, other = (print_module(module).splitlines() for module in (before, after))
        assert bool(lines) == (one != other)
        # A line for each that is not in both, and a few around.
        assert len(lines) <= len({*one} ^ {*other}) + 5 * len({*before.graphs, *after.graphs})
