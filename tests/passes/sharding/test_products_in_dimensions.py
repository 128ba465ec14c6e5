"""Products in one, two, two and a half and three dimensions of a mesh, by given layouts alone: forward and backward they
move the bytes of the closed forms, and compute what one device does.

For y = x w with x of M x K and w of K x N numbers, and q devices along an axis:

    1D      w[_,/a]                           nothing forward; a sum of x's gradient
    2D      x[/r,/c]    w[/r,/c]    y[/r,/c]    panels of x and w are gathered (SUMMA)
    2.5D    x[/d/r,/c]  w[/r,/c]    y[/d/r,/c]  so on each of d layers, which add the gradient of w up
    3D      x[/i/j,/l]  w[/l,/j/i]  y[/i/l,/j]  x, w and the sum of y travel along one axis each
"""

from __future__ import annotations

import pytest
from oracles.sharding.beside_xla.in_ir import collectives
from oracles.sharding.drawn_programs import DrawnProgram, laid_program
from oracles.sharding.team_runs import differences

from penstock.ir.text import parse_module
from penstock.ir.types import ITEM_BYTES
from penstock.ir.verify.verifier import check
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES

# The product's operands are parameters, so that both have gradients. %t only makes the loss.
TEXT = """
module @product {{
  input %t : {dtype}[{m},{n}]
  output %loss
  var @x : {dtype}[{m},{k}] param
  var @w : {dtype}[{k},{n}] param
  graph @main(%t : {dtype}[{m},{n}]) {{
    %p.x : {dtype}[{m},{k}] = read(@x)
    %p.w : {dtype}[{k},{n}] = read(@w)
    %h : {dtype}[{m},{k}] = tanh(%p.x)
    %y : {dtype}[{m},{n}] = matmul(%h, %p.w)
    %u : {dtype}[{m},{n}] = mul(%y, %t)
    %s : {dtype}[{m},{n}] = tanh(%u)
    %loss : {dtype}[] = mean(%s, axes=[0,1])
    return %loss
  }}
}}
"""
# The mesh; the layouts of x, w and y; and the shares of |x|, |w| and |y| that a device sends forward and backward.
PRODUCTS = {
    "1D": ("a=4", "[_,_]", "[_,/a]", "[_,/a]", (0, 0, 0), (2 * 3 / 4, 0, 0)),
    "2D": ("r=2,c=2", "[/r,/c]", "[/r,/c]", "[/r,/c]", (1 / 4, 1 / 4, 0), (2 / 4, 2 / 4, 0)),
    "2.5D": (
        "d=2,r=2,c=2",
        *("[/d/r,/c]", "[/r,/c]", "[/d/r,/c]"),
        (1 / 8, 1 / 4, 0),
        # The gradient of w is scattered over r, and what is left of it is added up over d.
        (2 / 8, 2 / 4 + 2 * (1 / 2) / 4, 0),
    ),
    "3D": ("i=2,j=2,l=2", "[/i/j,/l]", "[/l,/j/i]", "[/i/l,/j]", (1 / 8, 1 / 8, 1 / 8), (2 / 8, 2 / 8, 1 / 8)),
}
# The loss is a sum over all devices.
OF_THE_LOSS = 64


def case_of(name: str, dtype: str, m: int, k: int, n: int) -> DrawnProgram:
    mesh, x, w, y, *_ = PRODUCTS[name]
    module = parse_module(TEXT.format(dtype=dtype, m=m, k=k, n=n), "product.ir")
    calls = parse_pipeline("simplify, autodiff, optimizer{kind=sgd,lr=0.1}, simplify", PASSES)
    return laid_program(run_passes(module, calls, PASSES), mesh, (f"x={x}", f"w={w}", f"y={y}"))


def differ(name: str, m: int, k: int, n: int) -> list[str]:
    """Return the graphs of a product in which a device sends other bytes than the closed form says."""
    case = case_of(name, "f32", m, k, n)
    check(case.sharded, ("typed", "sharded"))
    check(case.local, ("typed", "local"))
    return [
        f"{graph}: {sent:,.0f} in place of {wanted:,.0f} bytes"
        for graph, (of_x, of_w, of_y) in zip("FB", PRODUCTS[name][4:], strict=True)
        for sent in [sum(one.sent for one in collectives(case.local, graph))]
        for wanted in [ITEM_BYTES["f32"] * (of_x * m * k + of_w * k * n + of_y * m * n)]
        if abs(sent - wanted) > OF_THE_LOSS
    ]


@pytest.mark.parametrize("name", PRODUCTS)
def test_bytes_are_those_of_the_closed_form(name: str) -> None:
    for m, k, n in ((1024, 1024, 1024), (2048, 3072, 1536), (3072, 1536, 2048), (8192, 768, 768)):
        assert differ(name, m, k, n) == [], (m, k, n)


def test_large_weights_stay_where_they_are() -> None:
    """Where w is larger than x and y, less moves than the closed form of panels says."""
    of_x, of_w, of_y = (sum(shares) for shares in zip(*PRODUCTS["2.5D"][4:], strict=True))
    m, k, n = 1024, 2048, 2048
    case = case_of("2.5D", "f32", m, k, n)
    sent = sum(one.sent for one in collectives(case.local, "FB"))
    assert sent < 0.75 * ITEM_BYTES["f32"] * (of_x * m * k + of_w * k * n + of_y * m * n)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_step_is_that_of_one_device(name: str) -> None:
    assert differences(case_of(name, "f64", 16, 8, 24)) == []


def test_control_other_layouts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows of w lie along c, panels have to change places before they are multiplied."""
    mesh, x, _, y, *shares = PRODUCTS["2D"]
    monkeypatch.setitem(PRODUCTS, "2D", (mesh, x, "[/c,/r]", y, *shares))
    assert differ("2D", 1024, 1024, 1024) != []


def test_control_a_device_with_the_part_of_another_is_noticed() -> None:
    case = case_of("2D", "f64", 16, 8, 24)
    assert differences(case, swapped={0: 1, 1: 0}) != []
