"""A hand-written training module of two stages that hand out gradients and norms (P, N).

One of the stages has separate weight gradients (W).

Both stages have @t, whose gradient is the sum of their parts; @u is of stage 0, @v, its state and @k of stage 1.
Updates of parameters depend on both parts of the norm, %n0 and %n1. @count has a copy on both stages; @clock is of no
stage and on stage 0 alone.
"""

from __future__ import annotations

from penstock.ir.graph import Module
from penstock.ir.text import parse_module

ONE = "const(value=1.0, shape=[4], dtype=f32)"
TIED = """    %t.sum : f32[4] = add(%t.s0, %t.s1)
    %scaled : f32[4] = mul(%t.sum, %norm)
    %t : f32[4] = read(@t)
    %m : f32[4] = read(@t.m)
    %rate : f32[] = const(value=0.5, shape=[], dtype=f32)
    %t1 : f32[4], %m1 : f32[4] = momentum(%t, %scaled, %m, %rate)
    write(%t1, @t)
    write(%m1, @t.m)
    %c : f32[4] = read(@count)
    %c1 : f32[4] = add(%c, %c)
    write(%c1, @count)
"""
AGREED = f"""module @m facts(differentiated, staged) {{
  stage 0 on cpu:0
  stage 1 on cpu:1
  input %x : f32[4]
  output %b
  var @t : f32[4] param
  var @t.grad : f32[4] grad init zeros
  var @t.m : f32[4] state init zeros
  var @count : f32[4] state init zeros
  var @clock : f32[4] state init zeros
  var @u : f32[4] stage 0 param
  var @u.grad : f32[4] stage 0 grad init zeros
  var @v : f32[4] stage 1 param
  var @v.grad : f32[4] stage 1 grad init zeros
  var @v.m : f32[4] stage 1 state init zeros
  var @k : f32[4] stage 1 param
  graph @s0.F(%x : f32[4]) {{
    %t : f32[4] = read(@t)
    %u : f32[4] = read(@u)
    %h : f32[4] = mul(%x, %t)
    %a : f32[4] = mul(%h, %u)
    save %h
    return %a
  }}
  graph @s0.B(%x : f32[4], %a.grad : f32[4], %h : f32[4]) {{
    %t.part0 : f32[4] = mul(%x, %a.grad)
    %u.part0 : f32[4] = mul(%h, %a.grad)
    accum(%t.part0, @t.grad)
    accum(%u.part0, @u.grad)
    return
  }}
  graph @s0.P() {{
    %t.s0 : f32[4] = take(@t.grad)
    %u.s0 : f32[4] = take(@u.grad)
    return %t.s0, %u.s0
  }}
  graph @s0.N(%t.s0 : f32[4], %t.s1 : f32[4]) {{
    %n0 : f32[4] = mul(%t.s0, %t.s1)
    return %n0
  }}
  graph @s0.U(%t.s0 : f32[4], %t.s1 : f32[4], %u.s0 : f32[4], %n0 : f32[4], %n1 : f32[4]) {{
    %norm : f32[4] = add(%n0, %n1)
    %factor : f32[4] = neg(%norm)
{TIED}    %own : f32[4] = const(value=0.1, shape=[4], dtype=f32)
    %u.step : f32[4] = mul(%u.s0, %factor)
    %u1 : f32[4] = mul(%u.step, %own)
    write(%u1, @u)
    write(%own, @clock)
    return %norm
  }}
  graph @s1.F(%a : f32[4]) {{
    %t : f32[4] = read(@t)
    %v : f32[4] = read(@v)
    %g : f32[4] = mul(%a, %t)
    %b : f32[4] = mul(%g, %v)
    save %a, %g
    return %b
  }}
  graph @s1.B(%a : f32[4]) {{
    %b.grad : f32[4] = {ONE}
    %a.grad : f32[4] = mul(%a, %b.grad)
    save %b.grad
    return %a.grad
  }}
  graph @s1.W(%b.grad : f32[4], %g : f32[4]) {{
    %k : f32[4] = read(@k)
    %t.part1 : f32[4] = mul(%g, %b.grad)
    %v.part1 : f32[4] = mul(%k, %b.grad)
    accum(%t.part1, @t.grad)
    accum(%v.part1, @v.grad)
    return
  }}
  graph @s1.P() {{
    %t.s1 : f32[4] = take(@t.grad)
    return %t.s1
  }}
  graph @s1.N() {{
    %v.sum : f32[4] = read(@v.grad)
    %n1 : f32[4] = mul(%v.sum, %v.sum)
    return %n1
  }}
  graph @s1.U(%t.s0 : f32[4], %t.s1 : f32[4], %n0 : f32[4], %n1 : f32[4]) {{
    %norm : f32[4] = add(%n0, %n1)
    %factor : f32[4] = neg(%norm)
{TIED}    %own : f32[4] = const(value=0.2, shape=[4], dtype=f32)
    %v.sum : f32[4] = take(@v.grad)
    %v.step : f32[4] = mul(%v.sum, %factor)
    %v1 : f32[4] = mul(%v.step, %own)
    write(%v1, @v)
    write(%v1, @k)
    write(%v.step, @v.m)
    return
  }}
}}
"""


def edited(*changes: tuple[str, str], graph: str = "") -> Module:
    """Return the module with lines replaced: in one graph, or everywhere."""
    text = AGREED
    begin = text.index(f"graph @{graph}(") if graph else 0
    end = text.index("  }\n", begin) if graph else len(text)
    part = text[begin:end]
    for old, new in changes:
        assert old in part, old
        part = part.replace(old, new)
    return parse_module(text[:begin] + part + text[end:])
