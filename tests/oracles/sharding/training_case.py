"""A small training program on a mesh whose local form has every kind of collective, and masks of uneven parts."""

from __future__ import annotations

from penstock.ir.graph import Module
from penstock.ir.text import parse_module
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES

from .drawn_programs import DrawnProgram, laid_program

MESH = "a=2,b=2"
# The hidden dimension has 5 elements for the two devices along a: the last part is padded. %t goes from one order of
# devices to another.
GIVEN = (
    "table=[/a,_]",
    "e=[/b/a,_]",
    "up=[_,/a]",
    "bias=[/a]",
    "down=[/a,_]",
    "n=[/a,_]",
    "s=[/a,_]",
    "t=[/a/b,_]",
    "u=[/b/a,_]",
)

_TEXT = """
module @case {
  input %ids : i64[8]
  output %loss
  var @table : f64[6,4] param
  var @scale : f64[4] param
  var @shift : f64[4] param
  var @up : f64[4,5] param
  var @bias : f64[5] param
  var @down : f64[5,4] param
  graph @main(%ids : i64[8]) {
    %p.table : f64[6,4] = read(@table)
    %p.scale : f64[4] = read(@scale)
    %p.shift : f64[4] = read(@shift)
    %p.up : f64[4,5] = read(@up)
    %p.bias : f64[5] = read(@bias)
    %p.down : f64[5,4] = read(@down)
    %e : f64[8,4] = gather(%p.table, %ids, axis=0)
    %n : f64[8,4], %mean : f64[8], %rstd : f64[8] = layer_norm(%e, %p.scale, %p.shift, axis=1, eps=0.01)
    %z : f64[8,5] = matmul(%n, %p.up)
    %b : f64[8,5] = add(%z, %p.bias)
    %c : f64[8,5] = sigmoid(%b)
    %y : f64[8,4] = matmul(%c, %p.down)
    %s : f64[8,4] = add(%y, %n)
    %t : f64[8,4] = tanh(%s)
    %u : f64[8,4] = sin(%t)
    %m : f64[5] = mean(%c, axes=[0])
    %v : f64[5] = softmax(%m, axis=0)
    %q : f64[] = mean(%v, axes=[0])
    %uu : f64[8,4] = mul(%u, %u)
    %r : f64[] = mean(%uu, axes=[0,1])
    %loss : f64[] = add(%q, %r)
    return %loss
  }
}
"""


def training_module() -> Module:
    """Return the program on one device, with its gradients and its update."""
    calls = parse_pipeline("simplify, autodiff, optimizer{kind=momentum,lr=0.1}, simplify", PASSES)
    return run_passes(parse_module(_TEXT, "case.ir"), calls, PASSES)


def training_case() -> DrawnProgram:
    return laid_program(training_module(), MESH, GIVEN)
