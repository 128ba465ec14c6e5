"""Attention whose positions several ranks share, in a ring: it is that of one device, forward and backward, and takes
the operations and bytes that the closed forms say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.sharding.laid_out import cut_out, places_of, put_together
from oracles.sharding.one_operation import compare, local_module, types_of
from oracles.sharding.threads import ThreadExchange, run_compiled
from torch.nn.functional import scaled_dot_product_attention

from penstock.ir.collective_calls import CollectiveCall, calls_of, sent_bytes
from penstock.ir.graph import Graph, Mesh, Module, Op, Stage, Value
from penstock.ir.interpreter.graphs import run_graph, run_team
from penstock.ir.interpreter.ops import NUMPY
from penstock.ir.ops import cost_of, make
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split
from penstock.ir.types import TensorType
from penstock.ir.verify.verifier import verify
from penstock.passes.communicate.overlap import overlap
from penstock.passes.sharding.forms import FOLDED
from penstock.passes.sharding.localize import localize
from penstock.passes.sharding.rings.ring import PositionRing

FOUR = Mesh("m", (("a", 4),), tuple(f"cpu:{i}" for i in range(4)))
THREE = Mesh("m", (("a", 3),), tuple(f"cpu:{i}" for i in range(3)))
TWO_BY_TWO = Mesh("m", (("a", 2), ("b", 2)), tuple(f"cpu:{i}" for i in range(4)))
BATCH, HEADS, DEPTH, WIDTH = 2, 3, 4, 5
# Each kind of mask: none, of all rows, of columns alone, and one that hides every key of some rows.
MASKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "none": ("", ()),
    "rows": ("f64", (-1, -1)),
    "columns": ("f64", (1, 1, 1, -1)),
    "hides": ("bool", (BATCH, 1, -1, -1)),
}
# How positions lie: whether later keys are looked at, and blocks.
WAYS = {"all keys": (False, 1), "causal in order": (True, 1), "causal folded": (True, FOLDED)}


def attention(positions: int, causal: bool, mask: str = "none", dtype: str = "f64") -> tuple[Op, Op, list[np.ndarray]]:
    """Return an attention, its gradient, and the operands of both: those of the attention, then dy."""
    rng = np.random.default_rng(positions)
    shape = (BATCH, HEADS, positions)
    ins = [Value(name, TensorType(dtype, (*shape, n))) for name, n in (("q", DEPTH), ("k", DEPTH), ("v", WIDTH))]
    arrays = [rng.standard_normal(v.type.dims) for v in ins]
    kind, dims = MASKS[mask]
    if kind:
        dims = tuple(positions if n < 0 else n for n in dims)
        ins.append(Value("mask", TensorType(kind, dims)))
        drawn = rng.standard_normal(dims)
        if kind == "bool":
            drawn[:, :, 1] = -1
        arrays.append(drawn > 0 if kind == "bool" else drawn)
    op = make("attention", tuple(ins), ["y", "top", "total"], scale=0.5, causal=causal)
    dy = Value("dy", op.outs[0].type)
    grad = make("attention_grad", (dy, *ins[:3], *op.outs, *ins[3:]), ["dq", "dk", "dv"], scale=0.5, causal=causal)
    return op, grad, [*arrays, rng.standard_normal(dy.type.dims)]


def laid(op: Op, mesh: Mesh, axes: tuple[str, ...], blocks: int) -> list[TensorType]:
    types = types_of(op, rule_of(op), {"s": Split(axes, blocks)}, mesh.sizes)
    assert types is not None
    return types


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", [*WAYS, "all keys, folded"])
def test_ranks_in_a_ring_compute_what_one_device_does(way: str, mask: str) -> None:
    causal, blocks = WAYS.get(way, (False, FOLDED))
    op, grad, (*arrays, dy) = attention(24, causal, mask)
    results = run_graph(Graph("whole", op.ins, op.outs, (op,)), arrays, precision="f64")
    for mesh, axes in ((FOUR, ("a",)), (THREE, ("a",)), (TWO_BY_TWO, ("b", "a"))):
        compare(op, arrays, mesh, laid(op, mesh, axes, blocks))
        compare(grad, [dy, *arrays[:3], *results, *arrays[3:]], mesh, laid(grad, mesh, axes, blocks))


def test_control_a_ring_that_turns_the_other_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    op, _, (*arrays, _) = attention(16, True)
    monkeypatch.setattr(PositionRing, "passed", lambda ring, x: ring.b.emit("shift", x, by=-1, over=ring.axes[0]))
    with pytest.raises(AssertionError):
        compare(op, arrays, FOUR, laid(op, FOUR, ("a",), FOLDED))


def test_unequal_parts_are_refused() -> None:
    """By the rule, and by the verifier, which is asked about the types themselves."""
    op, *_ = attention(18, True)
    assert types_of(op, rule_of(op), {"s": Split(("a",))}, FOUR.sizes) is None
    types = [v.type.laid([(), (), ("a",), ()][: v.type.rank]) for v in (*op.ins, *op.outs)]
    values = [Value(v.name, t) for v, t in zip((*op.ins, *op.outs), types, strict=True)]
    graph = Graph("s0.F", tuple(values[:3]), tuple(values[3:]), (Op(op.kind, values[:3], values[3:], op.attrs),))
    module = Module("m", graph.ins, meshes=(FOUR,), stages=(Stage(0, "m"),), graphs={"s0.F": graph})
    with pytest.raises(Exception, match="does not lie in 4 equal parts; reshard it first"):
        verify(module.but(facts=("sharded",)))


# ------------------------------------------------------------------------------------------------ as kernels


def rings(positions: int) -> Iterator[tuple[str, Op, Op, list[np.ndarray], int]]:
    for name, (causal, blocks) in WAYS.items():
        yield name, *attention(positions, causal, dtype="f32"), blocks


def one_graph(positions: int) -> tuple[Module, dict[str, np.ndarray], dict[str, list[Value]]]:
    """Return all ways forward and backward as one module, its inputs, and y, dq, dk, dv of each."""
    ops, arrays, results = list[Op](), dict[str, np.ndarray](), dict[str, list[Value]]()
    ins: list[Value] = []
    for number, (name, op, grad, operands, blocks) in enumerate(rings(positions)):
        known: dict[str, Value] = {}
        for one in (op, grad):
            types = laid(one, FOUR, ("a",), blocks)
            for value, t in zip((*one.ins, *one.outs), types, strict=True):
                known.setdefault(value.name, Value(f"w{number}.{value.name}", t))
            ops.append(Op(one.kind, *(tuple(known[v.name] for v in vs) for vs in (one.ins, one.outs)), one.attrs))
        given = [known[n] for n in ("q", "k", "v", "dy")]
        ins += given
        arrays |= {v.name: x.astype(np.float32) for v, x in zip(given, operands, strict=True)}
        results[name] = [known[n] for n in ("y", "dq", "dk", "dv")]
    outs = tuple(v for values in results.values() for v in values)
    graph = Graph("s0.F", tuple(ins), outs, tuple(ops))
    return (
        Module("rings", graph.ins, meshes=(FOUR,), stages=(Stage(0, "m"),), graphs={"s0.F": graph}),
        arrays,
        results,
    )


def by_torch(operands: list[np.ndarray], causal: bool) -> list[np.ndarray]:
    """Return the result and gradients of torch in double precision."""
    q, k, v = (torch.tensor(x.astype(np.float64), requires_grad=True) for x in operands[:3])
    y = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.5)
    y.backward(torch.tensor(operands[3].astype(np.float64)))
    return [y.detach().numpy(), *(x.grad.numpy() for x in (q, k, v) if x.grad is not None)]


def test_rings_as_kernels_agree_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every rank hands over the bytes of the closed forms: keys and values three times, and twice as much backward."""
    handed = Counter[tuple[int, str]]()
    begin = ThreadExchange.begin

    def counted(self: ThreadExchange, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        handed[self.place, call.op.outs[0].name.partition(".")[0]] += x.numel() * x.element_size()
        begin(self, call, x, out)

    monkeypatch.setattr(ThreadExchange, "begin", counted)
    module, arrays, results = one_graph(80)
    local = overlap(localize(module))
    parts = [{v.name: cut_out(arrays[v.name], v.type, FOUR, place) for v in module.inputs} for place in range(4)]
    got = run_compiled(local, parts, tmp_path, "tvm")
    around = 3 * 4 * BATCH * HEADS * (80 // 4) * (DEPTH + WIDTH)
    assert handed == {(place, f"w{number}"): 3 * around for place in range(4) for number in range(len(WAYS))}
    outs = list(module.graphs["s0.F"].outs)
    for number, (name, values) in enumerate(results.items()):
        operands = [arrays[f"w{number}.{n}"] for n in ("q", "k", "v", "dy")]
        for value, right in zip(values, by_torch(operands, WAYS[name][0]), strict=True):
            whole = put_together([of_rank[outs.index(value)] for of_rank in got], value.type, FOUR)
            np.testing.assert_allclose(whole, right, rtol=1e-5, atol=1e-5 * np.abs(right).max(), err_msg=f"{value}")
        # Control: the other mask has other results by far more.
        others = by_torch(operands, not WAYS[name][0])
        assert np.abs(others[1] - by_torch(operands, WAYS[name][0])[1]).max() > 1e-2


# ------------------------------------------------------------------------------------------------ closed forms


def local_ops(op: Op, blocks: int, mesh: Mesh = FOUR) -> Graph:
    return local_module(op, laid(op, mesh, ("a",), blocks), mesh)[1].graphs["s0.F"]


def operations(ops: tuple[Op, ...]) -> float:
    return sum(cost_of(op).flops for op in ops if op.kind in ("attention", "attention_grad"))


def test_folded_order_takes_half_of_the_operations_and_no_rank_more_than_another() -> None:
    """All ranks run one graph, so the slowest rank has as many operations as the mean. In folded order none is in vain:
    four ranks together do exactly what one device does. In order they do 7/4 of it, and without a mask 2."""
    for n, mesh in ((4, FOUR), (3, THREE)):
        forward, backward, _ = attention(48, True)
        every, every_grad, _ = attention(48, False)
        for causal_op, full_op in ((forward, every), (backward, every_grad)):
            full, plain, folded = (
                operations(local_ops(op, blocks, mesh).ops)
                for op, blocks in ((full_op, 1), (causal_op, 1), (causal_op, FOLDED))
            )
            assert n * folded == operations((causal_op,)) == operations((full_op,)) / 2
            assert folded == full / 2
            assert plain == pytest.approx(full * (n - 0.5) / n)


def pairs_of_ranks(blocks: int, backward: bool, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return how many pairs of a query and a key each rank computes, and how many of them a causal mask lets through.
    Queries and keys hold their positions, so pairs are counted where operations meet them."""
    positions, computed, looked_at = 48, Counter[int](), Counter[int]()
    forward, grad, (*arrays, dy) = attention(positions, True)
    results = run_graph(Graph("whole", forward.ins, forward.outs, (forward,)), arrays, precision="f64")
    for x in arrays[:2]:
        x[...] = np.arange(positions, dtype=np.float64)[:, None]
    op, operands = (grad, [dy, *arrays, *results]) if backward else (forward, arrays)
    types = laid(op, FOUR, ("a",), blocks)
    first = len(operands) - len(arrays) - len(results) if backward else 0
    owner = {at: place for place in range(4) for at in places_of(types[first], FOUR, place, 2)}
    usual = NUMPY[op.kind]

    def counted(ins, attrs):  # type: ignore[no-untyped-def]
        queries, keys = (x[0, 0, :, 0].astype(int) for x in ins[first : first + 2])
        rank = owner[queries[0]]
        inside = np.tri(len(queries), len(keys), dtype=bool) if attrs["causal"] else np.ones(1, bool)
        computed[rank] += int(np.broadcast_to(inside, (len(queries), len(keys))).sum())
        looked_at[rank] += int((inside & (keys <= queries[:, None])).sum())
        return usual(ins, attrs)

    with monkeypatch.context() as patch:
        patch.setitem(NUMPY, op.kind, counted)
        whole, module = local_module(op, types, FOUR)
        parts = [
            {v.name: cut_out(x, v.type, FOUR, place) for v, x in zip(whole.ins, operands, strict=True)}
            for place in range(4)
        ]
        run_team(module.graphs["s0.F"], parts, FOUR, precision="f64")
    assert sum(looked_at.values()) == positions * (positions + 1) / 2, "each pair once"
    return [(computed[rank], looked_at[rank]) for rank in range(4)]


@pytest.mark.parametrize("backward", [False, True])
def test_no_rank_has_more_pairs_to_compute_than_the_mean(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In folded order all pairs that are computed count, and the slowest rank has as many as the mean. The control is the
    plain order: its last rank has 7/4 of the mean, and the others compute as much in vain."""
    folded, plain = (pairs_of_ranks(blocks, backward, monkeypatch) for blocks in (FOLDED, 1))
    for pairs in zip(*folded, strict=True):
        assert max(pairs) <= 1.05 * sum(pairs) / 4
    assert all(computed == counts for computed, counts in folded)
    counts = [counts for _, counts in plain]
    assert max(counts) > 1.6 * sum(counts) / 4
    assert {computed for computed, _ in plain} == {counts[3]}


def test_bytes_are_those_of_the_closed_form() -> None:
    """Keys and values go n - 1 times forward, and backward once more, with their gradients as often."""
    for name, (causal, blocks) in WAYS.items():
        forward, backward, _ = attention(32, causal, dtype="f32")
        around = 3 * 4 * BATCH * HEADS * (32 // 4) * (DEPTH + WIDTH)
        sent = [sum(sent_bytes(call.op, 4) for call in calls_of(local_ops(op, blocks))) for op in (forward, backward)]
        assert sent == [around, 2 * around], name


@pytest.mark.parametrize("way", WAYS)
def test_a_shift_hides_behind_attention_unless_it_brings_gradients_home(way: str) -> None:
    """Shifts stand one step ahead of what needs them, and the pass `overlap` leaves them there."""
    causal, blocks = WAYS[way]
    forward, backward, _ = attention(4096, causal, dtype="f32")
    for op, bare in ((forward, 0), (backward, 2)):
        local = local_module(op, laid(op, FOUR, ("a",), blocks), FOUR)[1]
        for module in (local, overlap(local)):
            assert len(list(exposed(module.graphs["s0.F"].ops))) == bare


def exposed(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Yield the shifts between which and their first reader no attention stands."""
    for i, op in enumerate(ops):
        if op.kind == "shift":
            reader = next(j for j, other in enumerate(ops) if j > i and op.outs[0] in other.ins)
            if not any(other.kind.startswith("attention") for other in ops[i:reader]):
                yield op
