"""What a matrix product is to those who emit its loops: sizes, how operands are read, where results go."""

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
    """One batched product: sizes, accessors, and where results go. `a_along_k`: A is contiguous along k; `b_along_j`: B along j."""

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
    # Where an element of B lies in memory; when it is contiguous along k, squares of it are transposed in registers.
    b_address: Address | None = None
    # The operation, if B may be packed before the kernel runs.
    op: Op | None = None
    # Where an element of A lies in memory.
    a_address: Address | None = None
