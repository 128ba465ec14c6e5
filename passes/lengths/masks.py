"""The writer of masks along a bounded dimension.

In: values of a graph, and the layout that says which of their elements belong to the request. A dimension of n
elements in b blocks has n / b elements in each. Of those the first `n / b / size * live` are the request's. `live` is
the input `size.NAME`. Out: operations beside those of the graph, each written once for all that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from penstock.ir.attrs import Attr
from penstock.ir.graph import Namer, Op, Value
from penstock.ir.ladder.bounds import size_input
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, ITEM_BYTES, UNSIGNED, TensorType
from penstock.passes.sharding.padding import FINITE, ZERO

INDEX = TensorType("i64", ())
LOWEST = {
    "f16": -65504.0,
    "bf16": -3.3895313892515355e38,
    "f32": -3.4028234663852886e38,
    "f64": -1.7976931348623157e308,
}


class MaskWriter:
    """A list of operations of a graph, and the masks that it has already. `laid` are the types of its values, in which
    the bounded dimension is an axis; `padding` says what padding holds (passes/sharding/padding.py); `constants` are
    the elements of constants."""

    # A request has at least so many elements.
    least = 1

    def __init__(self, namer: Namer, name: str, size: int) -> None:
        self.namer, self.name, self.size = namer, name, size
        self.laid: dict[str, TensorType] = {}
        self.padding: dict[str, int] = {}
        self.constants: dict[str, tuple[float, ...]] = {}
        self.live = Value(size_input(name), INDEX)
        self.ops: list[Op] = []
        self.used = False
        self.loc = ""
        self._known: dict[Hashable, Value] = {}

    def emit(self, kind: str, *ins: Value, name: str = "", **attrs: Attr) -> Value:
        """Write an operation with one result; without a name it gets a fresh one."""
        base = f"{ins[0].name}.{kind}" if ins else f"live.{kind}"
        op = make(kind, ins, [name or self.namer.fresh(base)], self.loc, **attrs)
        self.ops.append(op)
        return op.outs[0]

    def once(self, key: Hashable, write: Callable[[], Value]) -> Value:
        """Return the value that is written once for all that ask by the same key."""
        if key not in self._known:
            self._known[key] = write()
        return self._known[key]

    def number(self, value: float | int | bool, dtype: str) -> Value:
        """Return a constant."""
        number: Attr = bool(value) if dtype == "bool" else float(value) if dtype in FLOATS else int(value)
        return self.once(("number", str(number), dtype), lambda: self.emit("const", value=number, dtype=dtype))

    def count(self, times: int, dtype: str = "i64") -> Value:
        """Return the elements of the request along a dimension that has so many times the bounded size."""
        self.used = True

        def write() -> Value:
            count = self.live if times == 1 else self.emit("mul", self.live, self.number(times, "i64"))
            return count if dtype == "i64" else self.emit("cast", count, dtype=dtype)

        return self.once(("count", times, dtype), write)

    def inside(self, rank: int, dim: int, n: int, blocks: int) -> Value:
        """Return where elements along a dimension belong to the request, of size 1 in all other dimensions."""

        def write() -> Value:
            each = n // blocks
            flat = self.once(
                ("flat", each),
                lambda: self.emit("less", self.emit("iota", dtype="i64", shape=(each,)), self.count(each // self.size)),
            )
            if blocks > 1:
                flat = self.emit("reshape", self.emit("broadcast", flat, shape=(blocks, each)), shape=(n,))
            shape = tuple(n if i == dim else 1 for i in range(rank))
            return flat if flat.type.dims == shape else self.emit("reshape", flat, shape=shape)

        return self.once(("inside", rank, dim, n, blocks), write)

    def blocks_of(self, x: Value, dim: int) -> int:
        """Return the number of blocks of a dimension, each of which is padded."""
        return self.laid[x.name].blocks_of(dim)

    def dims_of(self, x: Value) -> list[int]:
        """Return the bounded dimensions of a value."""
        laid = self.laid.get(x.name)
        return [dim for dim in range(laid.rank) if laid.axes_of(dim)] if laid is not None else []

    def with_padding(self, x: Value, dims: Iterable[int], number: float) -> Value:
        """Return a value with another number in its padding along some dimensions."""
        if number == 0.0 and self.padding.get(x.name) == ZERO:
            return x
        blocks = {dim: self.blocks_of(x, dim) for dim in dims}
        for dim, count in blocks.items():
            x = self.masked(x, dim, count, number)
        return x

    def finite(self, x: Value, dims: Iterable[int]) -> Value:
        """Return a value whose padding along some dimensions is finite, if the value is padded there."""
        padded = set(self.dims_of(x)) & set(dims)
        return x if self.padding.get(x.name, ZERO) <= FINITE else self.with_padding(x, sorted(padded), 0.0)

    def masked(self, x: Value, dim: int, blocks: int, padding: float) -> Value:
        """Return a value whose padding along a dimension is replaced."""

        def write() -> Value:
            mask = self.inside(x.type.rank, dim, x.type.dims[dim], blocks)
            return self.emit("where", mask, x, self.number(padding, x.type.dtype))

        return self.once(("masked", x.name, dim, blocks, str(padding)), write)


def lowest_of(dtype: str) -> float:
    """Return a number of an element type that none is below."""
    if dtype in UNSIGNED or dtype == "bool":
        return 0
    return float("-inf") if dtype in FLOATS else -float(1 << (8 * ITEM_BYTES[dtype] - 1))
