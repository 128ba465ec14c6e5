"""Padding of uneven dimensions: it reaches no sum, whatever operations make of it on the way."""

from __future__ import annotations

import pytest
from oracles.sharding.drawn_programs import DrawnProgram, laid_program
from oracles.sharding.team_runs import differences, run_parts

from penstock.ir.text import parse_module
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.passes.sharding import padding

# Five columns on two devices: the last part has a column of padding, which is zero in %b.
_TEXT = """
module @case {{
  input %x : f64[6,4]
  output %loss
  var @up : f64[4,5] param
  var @bias : f64[5] param
  var @down : f64[5,3] param
  graph @main(%x : f64[6,4]) {{
    %p.up : f64[4,5] = read(@up)
    %p.bias : f64[5] = read(@bias)
    %p.down : f64[5,3] = read(@down)
    %z : f64[6,5] = matmul(%x, %p.up)
    %b : f64[6,5] = add(%z, %p.bias)
{body}
    %y : f64[6,3] = matmul(%h, %p.down)
    %yy : f64[6,3] = mul(%y, %y)
    %q : f64[] = mean(%yy, axes=[0,1])
    %r : f64[] = mean(%h, axes=[0,1])
    %loss : f64[] = add(%q, %r)
    return %loss
  }}
}}
"""

BODIES = {
    # The gradient of a mean is no zero at padding, nor is that of a gelu at zero.
    "gelu": "%h : f64[6,5] = gelu(%b)",
    # 0 / 0 at padding is nan, and stays nan in a sigmoid.
    "sigmoid of nan": "%m : f64[6,5] = abs(%b)\n%v : f64[6,5] = div(%b, %m)\n%h : f64[6,5] = sigmoid(%v)",
    # The logarithm of zero is infinite, the cosine of that nan.
    "cosine of an infinity": "%m : f64[6,5] = abs(%b)\n%v : f64[6,5] = log(%m)\n%h : f64[6,5] = cos(%v)",
    # 0 beside rows that are all far below zero: too large a power at padding alone.
    # Zero at padding, beside rows that are all far below it: too large a power at padding alone.
    "exp of a large number": (
        "%c : f64[] = const(value=-1e6, dtype=f64)\n%a : f64[6,5] = abs(%b)\n%s : f64[6,5] = mul(%a, %c)\n"
        "%m : f64[6,1] = max(%s, axes=[1], keep=true)\n%v : f64[6,5] = sub(%s, %m)\n%h : f64[6,5] = exp(%v)"
    ),
    # The rows that a pad adds have ones at padding, too.
    "pad with ones": (
        "%w : f64[8,5] = pad(%b, low=[1,0], high=[1,0], value=1.0)\n%t : f64[8,1] = sum(%w, axes=[1], keep=true)\n"
        "%s : f64[6,1] = slice(%t, start=[0,0], stop=[6,1], step=[1,1])\n%h : f64[6,5] = mul(%b, %s)"
    ),
    # Padding alone is zero, and becomes an infinity.
    "where of an infinity": (
        "%o : f64[] = const(value=0.0, dtype=f64)\n%i : f64[] = const(value=inf, dtype=f64)\n"
        "%w : bool[6,5] = equal(%b, %o)\n%h : f64[6,5] = where(%w, %i, %b)"
    ),
    # Six rows on four devices: the last part has two rows of padding, in which the bias is repeated.
    "broadcast": (
        "%rows : f64[6,5] = broadcast(%p.bias, shape=[6,5])\n%v : f64[6,5] = sin(%rows)\n"
        "%s : f64[1,5] = sum(%v, axes=[0], keep=true)\n%h : f64[6,5] = mul(%b, %s)"
    ),
}


def case_of(body: str) -> DrawnProgram:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    calls = parse_pipeline("simplify, autodiff, optimizer{kind=momentum,lr=0.1}, simplify", PASSES)
    module = run_passes(parse_module(_TEXT.format(body=lines), "case.ir"), calls, PASSES)
    given = ("up=[_,/a]", "bias=[/a]", "h=[_,/a]")
    if "%rows" in body:
        return laid_program(module, "b=4,a=2", (*given, "rows=[/b,/a]"))
    return laid_program(module, "a=2", given)


def leaks(case: DrawnProgram) -> list[str]:
    """Return what differs from one device after a step, and variables whose padding is zero no more."""
    _, stores = run_parts(case.local, case.weights(), case.batch(), {})
    held = stores[1].arrays
    padded = {name: held[name][..., 2] for name in ("up", "bias")}
    return [*differences(case), *(f"padding of @{name}" for name, x in padded.items() if x.any())]


@pytest.mark.parametrize("name", BODIES)
def test_padding_reaches_no_sum_and_no_variable(name: str) -> None:
    case = case_of(BODIES[name])
    assert str(case.sharded.vars["up"].type) == "f64[4,5/a]"
    assert leaks(case) == []


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("gelu", {"_ELEMENTWISE": {"gelu_grad": (0, 1)}}),
        ("sigmoid of nan", {"_BOUNDED": set(), "_FINITE": {*padding._FINITE, "sigmoid"}}),
        ("cosine of an infinity", {"_BOUNDED": set(), "_FINITE": {*padding._FINITE, "cos"}}),
        ("exp of a large number", {"_FINITE": {*padding._FINITE, "exp"}}),
        ("pad with ones", {"_state_of": lambda number: padding.ZERO}),
        ("where of an infinity", {"_CHOSEN": padding.FINITE}),
        ("broadcast", {"_covers": lambda operand, result: True}),
    ],
)
def test_control_states_that_promise_too_much_are_noticed(name, tables, monkeypatch: pytest.MonkeyPatch) -> None:
    for table, content in tables.items():
        monkeypatch.setattr(padding, table, content)
    assert leaks(case_of(BODIES[name]))
