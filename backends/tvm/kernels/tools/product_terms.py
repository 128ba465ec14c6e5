"""The description of a matrix product that its loops are emitted from: sizes, accessors of the operands, and the place
of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.ir.graph import Op, Value

from .elements import Index
from .emit import Expr

Access = Callable[[Index, Expr, Expr], Expr]
Address = Callable[[Index, Expr, Expr], tuple[Value, Expr] | None]


@dataclass(frozen=True)
class Product:
    """One batched product. With `a_along_k`, A is contiguous along k; with `b_along_j`, B is contiguous along j."""

    out: Value
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Access
    b: Access
    place: Callable[[Index, Expr, Expr], Index]
    a_along_k: bool
    b_along_j: bool
    b_along_k: bool = False
    # Rows of A at the same k are neighbours in memory.
    a_along_i: bool = False
    # The address of an element of B. Where B is contiguous along k, squares of it are transposed in registers.
    b_address: Address | None = None
    # The operation, if B may be packed before the kernel runs.
    op: Op | None = None
    # The address of an element of A.
    a_address: Address | None = None
