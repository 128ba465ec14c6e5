"""Eight sharded programs beside XLA: with the same given layouts no more bytes are moved, and every device has its share
of the work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import pytest
from oracles.sharding.beside_xla.compiled_text import collectives_of
from oracles.sharding.beside_xla.in_ir import case_of, collectives
from oracles.sharding.beside_xla.moved import DATA, FORWARD, GRADIENTS, Moved, bytes_of, summed
from oracles.sharding.beside_xla.programs import PROGRAMS

from penstock.ir.graph import Module, Op
from penstock.ir.ops import OPS, cost_of
from penstock.ir.verify.verifier import check

Total = Mapping[str, Sequence[float]]
GRAPHS = {FORWARD: "F", GRADIENTS: "FBNU"}
# Sums of one number, such as the loss, are taken for nothing.
ROUNDING = 64
# Programs that move what XLA moves, by kind and bytes; the others move less.
EQUAL = {
    FORWARD: {*PROGRAMS} - {"sequence"},
    GRADIENTS: {"two-layer MLP", "vocabulary", "experts", "pictures"},
}


def moved(name: str, what: str) -> Total:
    return summed(collectives(case_of(name).local, GRAPHS[what]))


def same(ours: Total, theirs: Total) -> bool:
    """Return whether collectives of the same kinds move the same bytes."""
    kinds = {kind: (ours.get(kind, (0, 0.0)), theirs.get(kind, (0, 0.0))) for kind in (*ours, *theirs)}
    return all(a[0] == b[0] and abs(a[1] - b[1]) <= ROUNDING for a, b in kinds.values())


def compare(theirs: Mapping[str, Mapping[str, Total]]) -> None:
    for what in GRAPHS:
        ours = {name: moved(name, what) for name in PROGRAMS}
        more = {
            name: (bytes_of(total), bytes_of(theirs[name][what]))
            for name, total in ours.items()
            if bytes_of(total) > bytes_of(theirs[name][what]) + ROUNDING
        }
        assert more == {}, what
        assert {name for name, total in ours.items() if same(total, theirs[name][what])} == EQUAL[what], what


def test_no_program_moves_more_bytes_than_xla_does() -> None:
    compare(json.loads(DATA.read_text(encoding="utf-8"))["programs"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax") is None, reason="needs jax: the extra `peers`")
def test_the_data_is_what_jax_gives() -> None:
    made = subprocess.run(
        [sys.executable, str(DATA.with_name("in_jax.py")), "--print"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    here, kept = json.loads(made.stdout), json.loads(DATA.read_text(encoding="utf-8"))
    compare(here["programs"])
    if here["jax"] == kept["jax"]:
        assert here == kept


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_value_has_a_layout_that_the_verifier_accepts(name: str) -> None:
    check(case_of(name).sharded, ("typed", "sharded"))
    check(case_of(name).local, ("typed", "local"))


def products(module: Module, prefix: str, without: set[str]) -> float:
    """Return the operations of products, convolutions and attention, without those that have these results."""

    def counts(op: Op) -> bool:
        return OPS[op.kind].family == "contract" and op.outs[0].name not in without

    return sum(cost_of(op).flops for graph in "FB" for op in module.graphs[prefix + graph].ops if counts(op))


# Products that all devices compute: nothing that they take is split, or small operands are gathered for less than their
# sum would cost.
WHOLE = {"vocabulary": 3, "pictures": 3, "ResNet": 1}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_device_has_a_quarter_of_the_work(name: str) -> None:
    case = case_of(name)
    ops = [op for graph in "FB" for op in case.sharded.graphs[f"s0.{graph}"].ops if OPS[op.kind].family == "contract"]
    whole = [op for op in ops if all(v.type.is_plain for v in (*op.ins, *op.outs))]
    assert len(whole) == WHOLE.get(name, 0)
    left = {op.outs[0].name for op in whole}
    assert products(case.local, "s0.", left) == pytest.approx(products(case.sharded, "s0.", left) / 4, rel=0.02)


def test_collectives_are_read_from_compiled_text() -> None:
    text = """
  %r = f32[8,16]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true
  %j = (f32[8]{0}, f32[]) all-reduce(%a, %b), channel_id=2, replica_groups=[2,2]<=[4], to_apply=%add
  %g = f32[8,16]{1,0} all-gather(%x), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
  %m = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=1,'b'=2,'c'=2] {'b','c'}, to_apply=%add
  %t = (f32[2,4]{1,0}, f32[2,4]{1,0}) all-to-all(%c, %d), replica_groups={{0,1},{2,3}}
  %p = s32[4]{0} collective-permute(%e), channel_id=4, source_target_pairs={{0,1},{1,2}}
  %f = f32[8]{0} fusion(%all-reduce.1), kind=kLoop, calls=%c
"""
    assert collectives_of(text) == [
        Moved("all_reduce", 4, 512, 768.0),
        Moved("all_reduce", 2, 32, 32.0),
        Moved("all_reduce", 2, 4, 4.0),
        Moved("all_gather", 4, 512, 384.0),
        Moved("all_reduce", 4, 32, 48.0),
        Moved("all_to_all", 2, 64, 32.0),
        Moved("shift", 2, 16, 16.0),
    ]


def test_control_a_sum_too_many_is_noticed() -> None:
    theirs = json.loads(DATA.read_text(encoding="utf-8"))["programs"]
    less = {name: {what: {} for what in GRAPHS} if name == "experts" else both for name, both in theirs.items()}
    with pytest.raises(AssertionError, match="experts"):
        compare(less)
