"""A small training program whose pictures are split along their height: its local form has shifts and masks of edges."""

from __future__ import annotations

from penstock.ir.text import parse_module
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES

from .drawn_programs import DrawnProgram, laid_program

# Ten rows on three devices: the last part is padded.
_TEXT = """
module @case {
  input %x : f64[2,1,10,4]
  output %loss
  var @first : f64[2,1,3,3] param
  var @second : f64[1,2,3,1] param
  graph @main(%x : f64[2,1,10,4]) {
    %p.first : f64[2,1,3,3] = read(@first)
    %p.second : f64[1,2,3,1] = read(@second)
    %c : f64[2,2,10,4] = conv(%x, %p.first, pads=[1,1,1,1])
    %h : f64[2,2,10,4] = sigmoid(%c)
    %y : f64[2,1,10,4] = conv(%h, %p.second, pads=[1,0,1,0])
    %yy : f64[2,1,10,4] = mul(%y, %y)
    %loss : f64[] = mean(%yy, axes=[0,1,2,3])
    return %loss
  }
}
"""


def spatial_case() -> DrawnProgram:
    """Return the program, laid out."""
    calls = parse_pipeline("simplify, autodiff, optimizer{kind=momentum,lr=0.1}, simplify", PASSES)
    return laid_program(run_passes(parse_module(_TEXT, "case.ir"), calls, PASSES), "a=3", ("x=[_,_,/a,_]",))
