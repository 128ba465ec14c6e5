"""Domains of synthetic inputs: the numbers that a module is made for, as far as its operations say.

In: a module and one of its inputs. Out: a `Domain`, from which synthetic samples are drawn.

An input is followed through layout changes, casts, and sums and products with constants, over all stages. So
`scale * x + offset` is known of every value that carries it, as an upper bound. What such a value is used for says what
x may be:

    a place in a table, a class           no place past the last, also where several columns make one place
    compared with 0, 1, ..., n - 1        0 .. n - 1, as in a one-hot; where positions lie below a length, 0 .. n
    compared with the constant c          0 .. c + 1, or of floats 0 and 1: a mask
    taken as a boolean                    0 and 1
    (1 - x) * a large number              0 and 1: a mask that is added to scores
    log, sqrt, a broken power             positive numbers

Integers without any such use are 0 and 1, but those of 8 bits, which are bytes: all that 8 bits hold. Floats without
one are normal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import numpy as np

from penstock.ir.graph import Graph, Module, Op
from penstock.ir.ops import complete_attrs, definition
from penstock.ir.types import FLOATS, TensorType, numpy_dtype

from .ranges import MOVING, counted_from_the_end

# A factor from which on a term hides a score.
_HIDES = 1e3
_BYTES = {"u8": (0, 256), "i8": (-128, 128)}
_MOST = 2**31


class Domain(NamedTuple):
    """The numbers an input is drawn from: whole ones in [low, high), or normal floats where there is no range."""

    low: int = 0
    high: int | None = None
    positive: bool = False

    def draw(self, generator: np.random.Generator, type: TensorType) -> np.ndarray:
        """Draw an array of a type."""
        dtype = numpy_dtype(type.dtype)
        if self.high is not None:
            return generator.integers(self.low, self.high, type.dims).astype(dtype)
        normal = generator.standard_normal(type.dims, np.float32)
        return (np.abs(normal) + np.float32(0.1) if self.positive else normal).astype(dtype)


class _Bound(NamedTuple):
    """At most scale * x + offset, where x is the input; `flipped` is offset - x."""

    scale: float
    offset: float
    flipped: bool = False


class _Range(NamedTuple):
    """The least and the largest number of a value that no input decides; `counts` says that it is 0, 1, 2, ..."""

    low: float
    high: float
    counts: bool = False


@dataclass
class _Uses:
    """The uses of one input."""

    limits: set[int] = field(default_factory=set)
    thresholds: set[int] = field(default_factory=set)
    mask: bool = False
    positive: bool = False


def domain_of(module: Module, name: str) -> Domain:
    """Return the domain of an input."""
    dtype = next(value.type.dtype for value in module.data_inputs if value.name == name)
    uses = _Uses()
    # Values that go from one graph to another keep their names.
    shared, known = {name: _Bound(1, 0)}, 0
    while len(shared) > known:
        known = len(shared)
        for graph in module.graphs.values():
            _Walk(graph, shared, uses).run()
    if dtype == "bool" or uses.mask:
        return Domain(0, 2)
    if uses.limits:
        return Domain(0, max(1, min(uses.limits)))
    if dtype in FLOATS:
        return Domain(0, 2) if uses.thresholds else Domain(positive=uses.positive)
    if uses.thresholds:
        # Past the largest signed byte there is nothing to draw.
        return Domain(0, min(max(2, *uses.thresholds), _BYTES.get(dtype, (0, _MOST))[1]))
    return Domain(*_BYTES.get(dtype, (0, 2)))


class _Walk:
    """One graph, operation by operation."""

    def __init__(self, graph: Graph, shared: dict[str, _Bound], uses: _Uses) -> None:
        self.graph, self.shared, self.uses = graph, shared, uses
        self.lines = {value.name: shared[value.name] for value in graph.ins if value.name in shared}
        self.bounds: dict[str, _Range] = {}
        self.makers = {v.name: op for op in graph.ops for v in op.outs}

    def run(self) -> None:
        """Follow the input through the graph, and record what goes on to others."""
        for op in self.graph.ops:
            if any(value.name in self.lines for value in op.ins):
                self._use(op)
                if (line := self._carried(op)) is not None:
                    self.lines[op.outs[0].name] = line
            elif len(op.outs) == 1 and (bounds := self._bounded(op)) is not None:
                self.bounds[op.outs[0].name] = bounds
        for value in self.graph.outs:
            if value.name in self.lines:
                self.shared.setdefault(value.name, self.lines[value.name])

    def _bounded(self, op: Op) -> _Range | None:
        if op.kind == "const":
            raw = complete_attrs(op)["value"]
            numbers = [float(x) for x in (raw if isinstance(raw, tuple) else (raw,))]
            counts = len(numbers) > 1 and numbers == [float(i) for i in range(len(numbers))]
            return _Range(min(numbers), max(numbers), counts) if numbers else None
        if op.kind == "iota":
            # Along its axis, of which there is one.
            return _Range(0, op.outs[0].type.dims[int(complete_attrs(op)["axis"])] - 1, True)  # type: ignore[arg-type]
        if op.kind == "cast" or definition(op.kind).family == "layout":
            return self.bounds.get(op.ins[0].name)
        if op.kind == "mul" and all(v.name in self.bounds for v in op.ins):
            a, b = (self.bounds[v.name] for v in op.ins)
            ends = [x * y for x in a[:2] for y in b[:2]]
            return _Range(min(ends), max(ends))
        return None

    def _other(self, op: Op) -> tuple[int, _Range | None]:
        """Return which of two operands is the input, and the bounds of the other."""
        at = 0 if op.ins[0].name in self.lines else 1
        return at, self.bounds.get(op.ins[1 - at].name)

    def _carried(self, op: Op) -> _Bound | None:
        """Return what the first result says of the input, if anything."""
        kind, lines = op.kind, [self.lines[v.name] for v in op.ins if v.name in self.lines]
        if (kind == "cast" and op.outs[0].type.dtype != "bool") or definition(kind).family == "layout":
            return lines[0]
        if kind in ("detach", "minimum", "maximum", *MOVING):
            return lines[0]
        if kind == "where":
            # Negative places have the size added to them; those that are drawn are not negative.
            return min((self.lines[v.name] for v in op.ins[1:] if v.name in self.lines), default=None)
        if kind == "gather":
            return self.lines.get(op.ins[0].name)
        if kind in ("sum", "mean"):
            return lines[0] if op.outs[0].type.dtype in FLOATS else None
        if kind not in ("add", "sub", "mul") or any(line.flipped for line in lines):
            return None
        if len(lines) > 1:
            return _Bound(lines[0].scale + lines[1].scale, lines[0].offset + lines[1].offset) if kind == "add" else None
        at, other = self._other(op)
        return None if other is None else self._moved(kind, lines[0], at, other)

    def _moved(self, kind: str, line: _Bound, at: int, other: _Range) -> _Bound | None:
        """Return the sum, difference or product of the input and a number."""
        if kind == "add":
            return _Bound(line.scale, line.offset + other.high)
        if kind == "sub":
            return _Bound(line.scale, line.offset - other.low) if at == 0 else _Bound(-1, other.high, flipped=True)
        return _Bound(line.scale * other.high, line.offset * other.high) if other.low > 0 else None

    def _use(self, op: Op) -> None:
        uses, kind = self.uses, op.kind
        if kind in ("gather", "scatter") and op.ins[1].name in self.lines:
            rows = op.ins[0].type.dims[int(complete_attrs(op)["axis"])]  # type: ignore[arg-type]
            self._limit(op.ins[1].name, rows)
        elif kind in ("cross_entropy", "cross_entropy_grad") and op.ins[1].name in self.lines:
            self._limit(op.ins[1].name, op.ins[0].type.dims[-1])
        elif (size := counted_from_the_end(op, self.makers)) is not None and op.ins[2].name in self.lines:
            self._limit(op.ins[2].name, size)
        elif kind in ("equal", "less", "less_equal"):
            self._compared(op)
        elif kind == "rem" and op.ins[0].name in self.lines and (other := self.bounds.get(op.ins[1].name)) is not None:
            self._limit(op.ins[0].name, int(other.high))
        elif kind in ("log", "sqrt", "rsqrt") or (kind == "pow" and self._breaks(op)):
            line = self.lines[op.ins[0].name]
            uses.positive |= line.scale > 0 and line.offset >= 0
        elif (kind == "cast" and op.outs[0].type.dtype == "bool") or (kind == "where" and op.ins[0].name in self.lines):
            uses.mask = True
        elif kind == "mul" and len({v.name for v in op.ins}) > 1:
            at, other = self._other(op)
            line = self.lines[op.ins[at].name]
            hides = other is not None and max(abs(other.low), abs(other.high)) >= _HIDES
            uses.mask |= line.flipped and line.offset == 1 and hides

    def _breaks(self, op: Op) -> bool:
        """Return whether a power of the input has an exponent that is no whole number."""
        exponent = self.bounds.get(op.ins[1].name)
        return op.ins[0].name in self.lines and exponent is not None and not exponent.low.is_integer()

    def _compared(self, op: Op) -> None:
        at, other = self._other(op)
        line = self.lines[op.ins[at].name]
        if other is None or line.flipped or line.scale <= 0:
            return
        if other.counts:
            # Positions that lie below a length may all do so.
            more = 0 if op.kind == "equal" else 1
            self._limit(op.ins[at].name, int(other.high) + 1 + more)
        elif op.kind == "equal" or op.ins[0].type.dtype not in FLOATS:
            # A negative one asks where to count from, and says nothing.
            places = ((end - line.offset) / line.scale for end in other[:2] if isfinite(end))
            self.uses.thresholds |= {int(place) + 2 for place in places if place > 0 or op.kind == "equal"}

    def _limit(self, name: str, size: int) -> None:
        """Record that a value has to be below `size`."""
        line = self.lines[name]
        if line.scale > 0:
            self.uses.limits.add(int((size - 1 - line.offset) // line.scale) + 1)


def domains_of(module: Module, names: Iterable[str]) -> dict[str, Domain]:
    """Return the domains of several inputs."""
    return {name: domain_of(module, name) for name in names}
