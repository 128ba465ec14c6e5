"""Limits of integers in split programs: those of the same program on one device, whatever the layouts are."""

from __future__ import annotations

import pytest
from oracles.sharding.drawn_programs import laid_program

from penstock.ir.graph import Module
from penstock.ir.text import parse_module
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.runtime.data import ranges
from penstock.runtime.data.domains import domain_of
from penstock.runtime.data.ranges import integer_range

_TEXT = """
module @tokens {
  input %ids : i64[4,6]
  input %targets : i32[4,6]
  output %loss
  var @table : f64[11,8] param
  var @head : f64[8,5] param
  graph @main(%ids : i64[4,6], %targets : i32[4,6]) {
    %t : f64[11,8] = read(@table)
    %rows : f64[4,6,8] = gather(%t, %ids)
    %h : f64[8,5] = read(@head)
    %logits : f64[4,6,5] = matmul(%rows, %h)
    %loss : f64[], %lse : f64[4,6] = cross_entropy(%logits, %targets)
    return %loss
  }
}
"""
LAYOUTS = [
    ("a=2", ()),
    ("a=2", ("table=[/a,_]",)),
    ("a=2", ("ids=[/a,_]",)),
    ("a=3", ("ids=[_,/a]", "table=[/a,_]")),
    ("a=2", ("head=[_,/a]",)),
    ("a=2", ("targets=[/a,_]", "logits=[_,/a,_]")),
    ("a=2,b=2", ("table=[/a,/b]", "ids=[/b,/a]")),
    ("a=2,b=2", ("logits=[/b,_,/a]", "targets=[_,_]")),
    ("a=2,b=2", ("logits=[/a/b,_,_]", "targets=[_,_]")),
]


def limits_of(module: Module) -> list[tuple[object, object]]:
    return [(integer_range(module, name), domain_of(module, name)) for name in ("ids", "targets")]


def forms(mesh: str, given: tuple[str, ...]) -> tuple[Module, Module]:
    """Return the program on one device, and what one device of a mesh does."""
    calls = parse_pipeline("simplify, autodiff, optimizer{kind=sgd,lr=0.1}, simplify", PASSES)
    case = laid_program(run_passes(parse_module(_TEXT, "tokens.ir"), calls, PASSES), mesh, given)
    return case.whole, case.local


@pytest.mark.parametrize(("mesh", "given"), LAYOUTS)
def test_limits_are_those_of_one_device(mesh: str, given: tuple[str, ...]) -> None:
    whole, local = forms(mesh, given)
    assert integer_range(whole, "ids") == (-11, 11)
    assert integer_range(whole, "targets") == (0, 5)
    assert limits_of(local) == limits_of(whole)


def test_control_places_in_the_whole_are_what_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, local = forms("a=2", ("head=[_,/a]",))
    monkeypatch.setattr(ranges, "counted_from_the_end", lambda op, makers: None)
    assert integer_range(local, "targets") is None
