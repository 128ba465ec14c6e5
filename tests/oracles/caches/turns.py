"""Attention token by token over caches, and the same over whole sequences without a cache: what judges anything with a state.

A turn takes some rows of some sequences: a batcher in small, that gives blocks out in no order and pads turns with rows of nan.
`FAULTS` are mistakes that such a batcher could make; each must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.ir.graph import CACHE, Graph, Module, Op, Value, Var
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.ops import BLOCK, make
from penstock.ir.types import TensorType, parse_type

Array = np.ndarray
Run = Callable[[Mapping[str, Array]], list[Array]]
FAULTS = ("place", "table", "mask")


@dataclass(frozen=True)
class Shape:
    """A turn of `rows` rows of `sequences` sequences at most, over `blocks` blocks."""

    rows: int
    sequences: int
    blocks: int
    heads: int = 4
    cache_heads: int = 2
    size: int = 8
    dtype: str = "f32"
    per_sequence: int = 6
    window: int = 0
    cap: float = 0.0

    @property
    def scale(self) -> float:
        return float(self.size) ** -0.5


def turn_graph(shape: Shape, name: str = "main") -> Graph:
    """The graph of a turn: rows are put into both caches, then looked at."""
    rows, cache = (
        parse_type(f"f32[{shape.rows},{shape.cache_heads},{shape.size}]"),
        parse_type(f"{shape.dtype}[{shape.blocks},{BLOCK},{shape.cache_heads},{shape.size}]"),
    )
    types = {
        "q": f"f32[{shape.rows},{shape.heads},{shape.size}]",
        "k": str(rows),
        "v": str(rows),
        "turn.places": f"i32[{shape.rows}]",
        "turn.starts": f"i32[{shape.sequences + 1}]",
        "turn.lengths": f"i32[{shape.sequences}]",
        "turn.table": f"i32[{shape.sequences},{shape.per_sequence}]",
    }
    ins = {name: Value(name, parse_type(text)) for name, text in types.items()}
    puts = [
        Op("put", (ins[x], ins["turn.places"]), (Value(f"{x}.all", cache),), {"var": f"l0.{x}"}, "/attention")
        for x in ("k", "v")
    ]
    attend = make(
        "attend",
        (ins["q"], *(op.outs[0] for op in puts), ins["turn.starts"], ins["turn.lengths"], ins["turn.table"]),
        ["y"],
        "/attention",
        scale=shape.scale,
        window=shape.window,
        cap=shape.cap,
    )
    return Graph(name, tuple(ins.values()), attend.outs, (*puts, attend))


def turn_module(shape: Shape) -> Module:
    """A module of that graph, whole."""
    graph = turn_graph(shape)
    caches = {op.var: Var(op.var, op.outs[0].type, CACHE, init="zeros") for op in graph.ops if op.kind == "put"}
    return Module("turn", graph.ins, ("y",), vars=caches, graphs={"main": graph})


def whole_sequence(q: Array, k: Array, v: Array, shape: Shape) -> Array:
    """The rows of one sequence, all at once, by the attention that knows no cache."""
    length = len(q)
    group = shape.heads // shape.cache_heads
    ins = [np.repeat(x, n, axis=1).transpose(1, 0, 2)[None] for x, n in ((q, 1), (k, group), (v, group))]
    values = [Value(f"x{i}", TensorType("f32", x.shape)) for i, x in enumerate(ins)]
    if shape.cap or shape.window:
        return _capped(ins, length, shape)
    op = make("attention", values, ["y", "top", "sum"], scale=shape.scale, causal=True)
    return run_graph(Graph("main", op.ins, op.outs[:1], (op,)), ins)[0][0].transpose(1, 0, 2)


def _capped(ins: list[Array], length: int, shape: Shape) -> Array:
    """The same where scores are capped or a window slides, which that attention does not have."""
    q, k, v = (x[0].astype(np.float64) for x in ins)
    scores = q @ k.transpose(0, 2, 1) * shape.scale
    scores = shape.cap * np.tanh(scores / shape.cap) if shape.cap else scores
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    hidden = (distance < 0) | (distance >= (shape.window or length))
    grown = np.where(hidden, 0.0, np.exp(scores))
    return (grown / grown.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)


@dataclass
class Sequences:
    """Sequences that grow by turns. `take` says how many rows of each the next turn takes."""

    shape: Shape
    lengths: list[int]
    seed: int = 0
    fault: str = ""
    done: list[int] = field(init=False)
    found: list[list[Array]] = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = np.random.default_rng(self.seed)
        s = self.shape
        draw = lambda n, heads: rng.standard_normal((n, heads, s.size)).astype(np.float32)  # noqa: E731
        self.rows = [(draw(n, s.heads), draw(n, s.cache_heads), draw(n, s.cache_heads)) for n in self.lengths]
        self.done, self.found = [0] * len(self.lengths), [[] for _ in self.lengths]
        self.free = rng.permutation(s.blocks).tolist()
        self.blocks: list[list[int]] = [[] for _ in self.lengths]

    def plan(self) -> list[tuple[int, int]]:
        """Draw which sequences take how many rows; ever fewer are left."""
        room, chosen = self.shape.rows, []
        for s in self.rng.permutation(len(self.lengths)).tolist():
            left = self.lengths[s] - self.done[s]
            if left and room and len(chosen) < self.shape.sequences:
                count = int(self.rng.integers(1, min(left, room) + 1))
                chosen.append((s, count))
                room -= count
        return chosen

    def feed(self, chosen: list[tuple[int, int]]) -> dict[str, Array]:
        """The inputs of a turn."""
        shape = self.shape
        q, k, v = (np.full((shape.rows, h, shape.size), np.nan, np.float32) for h in self._heads())
        places = np.full(shape.rows, -1, np.int32)
        table = np.full((shape.sequences, shape.per_sequence), -1, np.int32)
        counts, lengths = np.zeros(shape.sequences, np.int32), np.zeros(shape.sequences, np.int32)
        row = 0
        for i, (s, count) in enumerate(chosen):
            begin = self.done[s]
            before = list(self.blocks[s])
            while len(self.blocks[s]) * BLOCK < begin + count:
                self.blocks[s].append(self.free.pop())
            for p in range(begin, begin + count):
                q[row], k[row], v[row] = (x[p] for x in self.rows[s])
                at = p + 1 if self.fault == "place" and p % BLOCK < BLOCK - 1 else p
                places[row] = self.blocks[s][at // BLOCK] * BLOCK + at % BLOCK
                row += 1
            known = (before or self.blocks[s]) if self.fault == "table" else self.blocks[s]
            known = [*known, *[known[-1]] * (len(self.blocks[s]) - len(known))]
            table[i, : len(known)] = known
            counts[i], lengths[i] = count, begin + count + (self.fault == "mask" and begin + count < len(known) * BLOCK)
        if self.fault == "place":
            places = _distinct(places)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        names = ("q", "k", "v", "turn.places", "turn.starts", "turn.lengths", "turn.table")
        return dict(zip(names, (q, k, v, places, starts, lengths, table), strict=True))

    def _heads(self) -> tuple[int, int, int]:
        return self.shape.heads, self.shape.cache_heads, self.shape.cache_heads

    def play(self, run: Run) -> None:
        """Run turns until all sequences are through."""
        while chosen := self.plan():
            (y,) = run(self.feed(chosen))
            row = 0
            for s, count in chosen:
                self.found[s].append(np.array(y[row : row + count]))
                self.done[s] += count
                row += count
            assert not np.any(y[row:]), "padding is not zero"

    def worst(self) -> float:
        """The largest difference from the whole sequences."""
        errors = [0.0]
        for rows, parts in zip(self.rows, self.found, strict=True):
            difference = np.abs(np.concatenate(parts) - whole_sequence(*rows, self.shape))
            errors.append(float(difference.max()) if np.isfinite(difference).all() else np.inf)
        return max(errors)


def _distinct(places: Array) -> Array:
    """Leave out what is stored twice, so that nothing but the numbers tells."""
    seen: set[int] = set()
    kept = places.copy()
    for i, place in enumerate(places.tolist()):
        kept[i] = -1 if place in seen else place
        seen.add(place)
    return kept
