"""The loops that a device provides for generators that serve several kinds of device.

In: what a generator computes at an element, in a reduction, in a product or along a row. Out: the interface that
`Body.loops` has. CPUs use the loops that stand beside the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from penstock.ir.graph import Value

from .elements import Index
from .emit import Buffer, Expr
from .product_terms import Product
from .sweep import Combine, HasEmitter, SweepOf

B_contra = TypeVar("B_contra", bound=HasEmitter, contravariant=True)


class RowLoops(Protocol):
    """Loops over all rows of a tensor along some consecutive axes: outer dimensions, the axis (one run), inner
    dimensions."""

    length: int
    across: bool
    row: Index
    tail: Index
    in_one_pass: bool

    def each(self, one_row: Callable[[], None]) -> None: ...

    def index(self, position: Expr) -> Index: ...

    def along(self, position: Expr) -> Index: ...

    def scratch(self, dtype: str) -> Callable[[Expr], tuple[Buffer, Expr]] | None: ...

    def reduce(
        self, dtype: str, steps: Sequence[tuple[float, Combine]], element: Callable[[Expr], Sequence[Expr]]
    ) -> list[Expr]: ...

    def one(self, dtype: str, start: float, combine: Combine, element: Callable[[Expr], Expr]) -> Expr: ...

    def top_and_total(self, dtype: str, element: Callable[[Expr], Expr]) -> tuple[Expr, Expr]: ...

    def store(self, element: Callable[[Expr, Index], dict[Value, Expr]]) -> None: ...


class Loops(Protocol[B_contra]):
    """The loops of one kind of device; each finishes every element it computes."""

    def nest(self, body: B_contra, shape: tuple[int, ...], merged: int, point: Callable[[Index], None]) -> None: ...

    def reduce(self, sweep: SweepOf[B_contra]) -> None: ...

    def product(self, body: B_contra, product: Product) -> None: ...

    def rows(
        self, body: B_contra, shape: tuple[int, ...], first: int, last: int, values: Sequence[Value]
    ) -> RowLoops: ...
