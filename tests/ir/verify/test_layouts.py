"""Programs over several devices that are wrong in one place: each is refused, or found by comparison with the whole
program, with the right value named."""

from __future__ import annotations

from functools import cache

import pytest
from oracles.sharding.spatial_case import spatial_case
from oracles.sharding.team_runs import differences
from oracles.sharding.training_case import training_case

from penstock.ir.graph import Module
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import check
from penstock.support.errors import VerifyError

case, pictures = cache(training_case), cache(spatial_case)


def changed(module: Module, before: str, after: str) -> Module:
    """Return the module with one place of its text changed."""
    text = print_module(module)
    assert text.count(before) == 1, f"{before!r} is there {text.count(before)} times"
    return parse_module(text.replace(before, after), "changed.ir")


def test_the_program_itself_is_right() -> None:
    check(case().sharded, ("typed", "sharded"))
    check(case().local, ("typed", "local"))
    assert differences(case()) == []


# What is changed, the text before and after, and the value and the reason that the verifier names.
REFUSED = {
    "a dropped all_reduce of a replicated gradient": (
        "accum(%p.scale.grad, ",
        "accum(%p.scale.grad.partial, ",
        "%p.scale.grad.partial may differ along a, b",
    ),
    "a sum over one axis of two": (
        "all_reduce(%p.shift.grad.partial, over=[a,b]",
        "all_reduce(%p.shift.grad.partial, over=a",
        "%p.shift.grad may differ along b",
    ),
    "a loss added up over the wrong ranks": (
        "all_reduce(%loss.partial, over=a)",
        "all_reduce(%loss.partial, over=b)",
        "returns the output %loss, which may differ along a",
    ),
    "a gather of the wrong dimension": (
        "all_gather(%n, axis=0, over=a, size=8, blocks=1)\n",
        "all_gather(%n, axis=1, over=a, size=8, blocks=1)\n",
        "%n.laid",
    ),
    "a scatter of the wrong dimension": (
        "reduce_scatter(%y.partial, axis=0,",
        "reduce_scatter(%y.partial, axis=1,",
        "%y ",
    ),
    "a gather to the wrong size": (
        "all_gather(%s.grad, axis=0, over=[b,a], size=8,",
        "all_gather(%s.grad, axis=0, over=[b,a], size=7,",
        "%s.grad.laid",
    ),
    "the part of another device": (
        "gather(%n.unlaid.all_gather.reshape, %mesh.a, axis=0)",
        "gather(%n.unlaid.all_gather.reshape, %mesh.b, axis=0)",
        "returns the output %loss, which may differ along b",
    ),
    "a sum that is added up twice": (
        "%loss : f64[] = all_reduce(%loss.partial, over=a)",
        "%once : f64[] = all_reduce(%loss.partial, over=a)\n    %loss : f64[] = all_reduce(%once, over=a)",
        "%once is the same along a on all ranks of a team; all_reduce would multiply it",
    ),
    "a scatter of what was added up": (
        "%y : f64[4,4] = reduce_scatter(%y.partial, ",
        "%y.sum : f64[8,4] = all_reduce(%y.partial, over=a)\n    %y : f64[4,4] = reduce_scatter(%y.sum, ",
        "%y.sum is the same along a",
    ),
    "the powers of a softmax added up over the wrong ranks": (
        "all_reduce(%local.places.add.reshape.less.where.sub.exp.sum, over=a)",
        "all_reduce(%local.places.add.reshape.less.where.sub.exp.sum, over=b)",
        "less.where.sub.exp.sum is the same along b",
    ),
    "an axis that is not there": ("all_reduce(%loss.partial, over=a)", "all_reduce(%loss.partial, over=c)", "%loss"),
    "a variable that lies in another way": ("var @down : f64[5/a,4]", "var @down : f64[5,4/a]", "@down"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mutation_of_the_local_form_is_refused(name: str) -> None:
    before, after, named = REFUSED[name]
    with pytest.raises(VerifyError) as refusal:
        check(changed(case().local, before, after), ("typed", "local"))
    assert named in str(refusal.value)


WRONG_LAYOUTS = {
    "a partial sum in an operation that is not linear in it": (
        "%loss.partial : f64[]+a = add(%q, %r.laid)",
        "%loss.partial : f64[]+a = mul(%q, %r.laid)",
        "takes %q, %r.laid, a sum that is not added up over a",
    ),
    "a replicated gradient that nobody adds up": (
        "accum(%p.scale.grad, ",
        "accum(%p.scale.grad.partial, ",
        "%p.scale.grad.partial is f64[4]+a+b, @scale.grad is f64[4]",
    ),
    "a product whose sum is taken for whole": ("%y.partial : f64[8,4]+a", "%y.partial : f64[8,4]", "%y.partial"),
    "a result that lies in another way": ("%s : f64[8/a,4] = add(%y, %n)", "%s : f64[8,4/a] = add(%y, %n)", "%s"),
}


@pytest.mark.parametrize("name", WRONG_LAYOUTS)
def test_a_mutation_of_the_whole_form_is_refused(name: str) -> None:
    before, after, named = WRONG_LAYOUTS[name]
    with pytest.raises(VerifyError) as refusal:
        check(changed(case().sharded, before, after), ("typed", "sharded"))
    assert named in str(refusal.value)


# What is changed, the text before and after, and the first value that differs from that of one device.
FOUND = {
    "parts in the order of other devices": (
        "all_gather(%u.unlaid, axis=0, over=[a,b]",
        "all_gather(%u.unlaid, axis=0, over=[b,a]",
        "%u",
    ),
    "a missing mask of an uneven dimension": (
        "where(%local.places.add.reshape.less, %m, %local.number.8)",
        "reshape(%m, shape=[3])",
        "%v",
    ),
    "a shifted offset of a part": (
        "%local.number.35 : i64[] = const(value=3,",
        "%local.number.35 : i64[] = const(value=2,",
        "%p.table.grad.partial",
    ),
    "blocks that are not there": (
        "all_gather(%n, axis=0, over=a, size=8, blocks=1)\n",
        "all_gather(%n, axis=0, over=a, size=8, blocks=2)\n",
        "%n.laid",
    ),
    "a sum over an axis that the sum does not have": (
        "all_reduce(%r, over=b)",
        "all_reduce(%r, over=[a,b])",
        "%r.laid",
    ),
    "the largest element for the sum": (
        "all_reduce(%r, over=b)",
        "all_reduce(%r, over=b, by=max)",
        "%r.laid",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_mutation_is_found_by_comparison(name: str) -> None:
    before, after, first = FOUND[name]
    local = changed(case().local, before, after)
    check(local, ("typed", "local"))
    found = differences(case(), local)
    assert found[:1] == [first]


# The same of pictures that are split along their height.
FOUND_IN_PICTURES = {
    "a shift the other way": ("shift(%x.slice, by=1, over=a)", "shift(%x.slice, by=-1, over=a)", "%c"),
    "strips in the wrong order": (
        "concat(%local.number.6.less_equal.and.where, %local.places.add.reshape.less.where, %x.slice.1.shift, axis=2)",
        "concat(%x.slice.1.shift, %local.places.add.reshape.less.where, %local.number.6.less_equal.and.where, axis=2)",
        "%c",
    ),
    "a missing mask above the picture": (
        "where(%local.number.6.less_equal.and, %h.slice.shift, %local.number.9)",
        "reshape(%h.slice.shift, shape=[2,2,1,4])",
        "%y",
    ),
    "a missing mask of padded rows": (
        "where(%local.places.add.reshape.less, %h, %local.number.8)",
        "reshape(%h, shape=[2,2,4,4])",
        "%y",
    ),
    "a row too early": (
        "slice(%h, start=[0,0,3,0], stop=[2,2,4,4], step=[1,1,1,1])",
        "slice(%h, start=[0,0,2,0], stop=[2,2,3,4], step=[1,1,1,1])",
        "%y",
    ),
}


@pytest.mark.parametrize("name", FOUND_IN_PICTURES)
def test_a_mutation_of_a_split_picture_is_found_by_comparison(name: str) -> None:
    before, after, first = FOUND_IN_PICTURES[name]
    assert differences(pictures()) == []
    local = changed(pictures().local, before, after)
    check(local, ("typed", "local"))
    assert differences(pictures(), local)[:1] == [first]


def test_parts_of_variables_of_another_rank_are_found() -> None:
    found = differences(case(), swapped={0: 2, 2: 0})
    assert found[0] == "%p.table"
    assert "@table" in found
