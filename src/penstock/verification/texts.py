"""The check of a bundle that generates text: its tokens against the whole sequence, computed at once without a cache.

In: a bundle. Out: an exit code. Prompts of several lengths are continued together: in chunks, through the caches, with
rows of other sequences beside them. The judge is the model before it was cut, interpreted in float64, in which
attention reads the rows of the sequence itself: no place, table or length has a part in it (`without_caches`).

A token is right where its logit is the largest, or as close to it as the tolerance says. Sequences are as long as the
largest turn: the judge computes one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.ir.attrs import Attr
from penstock.ir.graph import CACHE, Graph, Op, Value
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64
from penstock.ir.interpreter.store import DictStore
from penstock.ir.ops import make
from penstock.runtime.generation.generator import GenerationOptions
from penstock.runtime.generation.turn import Draw, Share, TokenTurn
from penstock.runtime.job.rungs import load
from penstock.support.errors import VerifyError
from penstock.support.terminal import say
from penstock.support.words import counted

# Logits are compared relative to the spread of all logits of a row.
TOLERANCE = 1e-4
# The judge does not round what caches of 16 bits do.
ROUNDED = 1e-2


def verify_text(bundle: Bundle, seed: int, tolerance: float | None) -> int:
    """Continue prompts, and judge every token."""
    reference, model = bundle.reference, load(bundle.path)
    if reference is None:
        raise VerifyError(
            "the bundle holds no reference model to compare with", where=str(bundle.path), hint="compile it again"
        )
    facts = model.generator.facts
    rounded = any(var.role == CACHE and var.type.dtype != "f32" for var in reference.vars.values())
    limit = tolerance if tolerance is not None else ROUNDED if rounded else TOLERANCE
    most = min(max(facts.rungs), facts.context - 1)
    draw = np.random.default_rng(seed)
    lengths = sorted({max(1, most // 4), max(1, most // 2), 1, min(5, most)})
    prompts = [draw.integers(0, facts.words, length).tolist() for length in lengths]
    texts: list[list[int]] = [[*prompt] for prompt in prompts]
    for piece in model.generator.generate_many(prompts, GenerationOptions(max(1, most // 4), temperature=0.0)):
        texts[piece.prompt].append(piece.token)
    graph = without_caches(reference.graphs["main"])
    store = DictStore({name: np.asarray(array) for name, array in bundle.weights().items()})
    worst, wrong, count = 0.0, 0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        for position, logits in logits_of(graph, store, text, len(prompt), max(facts.rungs)):
            gap = float((logits.max() - logits[text[position]]) / max(float(np.ptp(logits)), 1e-30))
            worst, wrong, count = max(worst, gap), wrong + (not gap <= limit), count + 1
    said = f"{counted(count, 'token')} of {counted(len(prompts), 'text')} against whole sequences without a cache"
    if wrong:
        say(f"{said}: {wrong} FAILED, the worst by {worst:.1e} of its logits, {limit:.1e} allowed")
        return VerifyError.exit_code
    say(f"{said}: ok, at most {worst:.1e} of the logits from the largest")
    return 0


def without_caches(graph: Graph) -> Graph:
    """Return a graph whose rows are one sequence from its beginning, which gives the logits of the chosen rows.

    `attend` becomes plain operations on the rows that `put` would store.
    """
    stored = {op.outs[0]: op.ins[0] for op in graph.ops if op.kind == "put"}
    ops: list[Op] = []
    outs: list[Value] = []
    for op in graph.ops:
        if op.kind == "attend":
            q, keys, values = op.ins[:3]
            ops += _attention(op, q, stored[keys], stored[values])
        elif op.kind == "pick":
            outs.append(op.ins[0])
        elif op.kind != "put":
            ops.append(op)
    return replace(graph, ops=tuple(ops), outs=tuple(outs))


def _attention(op: Op, q: Value, k: Value, v: Value) -> list[Op]:
    """Write causal attention of rows among themselves, with grouped heads, a window and a cap."""
    ops: list[Op] = []
    name = op.outs[0].name

    def emit(kind: str, ins: Sequence[Value], result: str = "", **attrs: Attr) -> Value:
        ops.append(make(kind, ins, (result or f"{name}.judge{len(ops)}",), op.loc, **attrs))
        return ops[-1].outs[0]

    rows, heads, _ = q.type.dims
    group = heads // k.type.dims[1]
    qs = emit("transpose", [q], perm=(1, 0, 2))
    ks, vs = (_repeated(emit, x, group) for x in (k, v))
    scores = emit("mul", [emit("matmul", [qs, ks], tb=True), emit("const", [], value=op.attrs["scale"], dtype="f32")])
    cap, window = op.attrs["cap"], op.attrs["window"]
    if cap:
        factor = emit("const", [], value=cap, dtype="f32")
        scores = emit("mul", [emit("tanh", [emit("div", [scores, factor])]), factor])
    here = emit("iota", [], dtype="i32", shape=(rows, 1), axis=0)
    there = emit("iota", [], dtype="i32", shape=(1, rows), axis=1)
    seen = emit("less_equal", [there, here])
    if window:
        reach = emit("add", [there, emit("const", [], value=window, dtype="i32")])
        seen = emit("and", [seen, emit("less", [here, reach])])
    hidden = emit("const", [], value=-1e30, dtype="f32")
    shares = emit("softmax", [emit("where", [seen, scores, hidden])], axis=-1)
    mixed = emit("matmul", [shares, vs])
    emit("transpose", [mixed], name, perm=(1, 0, 2))
    return ops


def _repeated(emit: Callable[..., Value], x: Value, group: int) -> Value:
    """Write rows as [heads, rows, size], with each head as often as its group of queries has heads."""
    rows, heads, size = x.type.dims
    apart = emit("reshape", [emit("transpose", [x], perm=(1, 0, 2))], shape=(heads, 1, rows, size))
    grouped = emit("broadcast", [apart], shape=(heads, group, rows, size))
    return emit("reshape", [grouped], shape=(heads * group, rows, size))


def logits_of(
    graph: Graph, store: DictStore, text: Sequence[int], first: int, rows: int
) -> Sequence[tuple[int, np.ndarray]]:
    """Return the logits in front of each token of a text behind its prompt."""
    types = {value.name: value.type.dims for value in graph.ins}
    each, count = types["turn.table"][1], types["turn.chosen"][0]
    share = Share(0, tuple(text[:rows]), 0, tuple(range(each)), Draw(), chooses=True)
    inputs: Mapping[str, np.ndarray] = TokenTurn(rows, (share,)).arrays(count, each)
    pairs: list[tuple[int, np.ndarray]] = []
    positions = list(range(first, len(text)))
    for start in range(0, len(positions), count):
        part = positions[start : start + count]
        chosen = np.zeros(count, np.int32)
        chosen[: len(part)] = np.asarray(part) - 1
        fed = {**inputs, "turn.chosen": chosen}
        (logits,) = run_graph(graph, [fed[value.name] for value in graph.ins], store, precision=F64)
        pairs += list(zip(part, logits, strict=False))
    return pairs
