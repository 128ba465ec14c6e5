"""The tables, and the functions that add to them and read them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Op, Value
from penstock.ir.interpreter.ops import Rule
from penstock.ir.ops import complete_attrs, infer_op, make
from penstock.ir.types import parse_type

from .data import SINGLE, Array, Draw, normal
from .related import RELATED


@dataclass(frozen=True)
class Sample:
    """One operation on operands of given types. `pattern` are types and attributes before an element type was put in for `T`, if it was."""

    kind: str
    types: tuple[str, ...]
    attrs: Mapping[str, Attr]
    draws: tuple[Draw, ...]
    pattern: tuple[tuple[str, ...], Mapping[str, Attr]]
    dtype: str

    @property
    def op(self) -> Op:
        ins = tuple(Value(f"x{i}", parse_type(t)) for i, t in enumerate(self.types))
        count = len(infer_op(Op(self.kind, ins, (), self.attrs), {}))
        return make(self.kind, ins, [f"y{i}" for i in range(count)], "", **self.attrs)

    def graph(self, name: str) -> Graph:
        """A graph of this operation alone."""
        op = self.op
        return Graph(name, op.ins, op.outs, (op,))

    def arrays(self) -> list[Array]:
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        draws = (*self.draws, *(normal,) * len(self.types))
        arrays = [draw(rng, parse_type(t)) for t, draw in zip(self.types, draws, strict=False)]
        return RELATED[self.kind](arrays, complete_attrs(self.op)) if self.kind in RELATED else arrays

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.types)}{''.join(f', {k}={v}' for k, v in self.attrs.items())})"


@dataclass(frozen=True)
class Refused:
    """An operation that must not get past type inference; `message` is a regular expression."""

    kind: str
    types: tuple[str, ...]
    attrs: Mapping[str, Attr]
    message: str

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.types)}{''.join(f', {k}={v}' for k, v in self.attrs.items())})"


SAMPLES: list[Sample] = []
REFUSED: list[Refused] = []


def sample(
    kind: str, *pattern: str, dtypes: Sequence[str] = SINGLE, draws: Sequence[Draw] | Draw = (), **attrs: object
) -> None:
    """Add an operation for each element type; one draw stands for all operands."""
    chosen = tuple(draws) if isinstance(draws, Sequence) else (draws,) * len(pattern)
    for dtype in dtypes:
        types, filled = fill((pattern, attrs), dtype)
        named = types[0].partition("[")[0] if types and not any("T" in p for p in pattern) else dtype
        SAMPLES.append(Sample(kind, types, filled, chosen, (pattern, attrs), named))  # type: ignore[arg-type]


def fill(
    pattern: tuple[tuple[str, ...], Mapping[str, object]], dtype: str
) -> tuple[tuple[str, ...], dict[str, object]]:
    """Types and attributes with an element type in the place of `T`."""
    types, attrs = pattern
    return tuple(t.replace("T", dtype) for t in types), {k: dtype if v == "T" else v for k, v in attrs.items()}


def is_open(s: Sample) -> bool:
    """Whether a sample stands for several element types."""
    types, attrs = s.pattern
    return any("T" in t for t in types) or "T" in attrs.values()


def refuse(kind: str, *types: str, because: str, **attrs: object) -> None:
    REFUSED.append(Refused(kind, types, attrs, because))  # type: ignore[arg-type]


def samples_of(kind: str) -> list[Sample]:
    return [s for s in SAMPLES if s.kind == kind]


def unsampled(kinds: Iterator[str] | Sequence[str]) -> set[str]:
    """Rows that nobody looks at."""
    return set(kinds) - {s.kind for s in SAMPLES}


def touched(rule: Rule) -> Rule:
    """A rule with the last element of its first result changed: what any comparison must at least see."""

    def wrong(x: Sequence[Array], a: Mapping[str, Any]) -> tuple[Array, ...]:
        first, *rest = (np.array(y) for y in rule(x, a))
        if first.size:
            at = tuple(n - 1 for n in first.shape)
            first[at] = (
                ~first[at]
                if first.dtype == bool
                else 1
                if not np.isfinite(first[at])
                else first[at] + first.dtype.type(1)
            )
        return (first, *rest)

    return wrong
