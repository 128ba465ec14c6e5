"""The writer of local operations: what `localize`, reshards and own forms are written with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

from penstock.ir.attrs import Attr
from penstock.ir.graph import COORDINATE, Namer, Op, Value
from penstock.ir.ops import make
from penstock.ir.types import TensorType

INDEX = TensorType("i64", ())


class LocalWriter:
    """A list of operations of one local graph. `sizes` are those of the mesh's axes; `coordinates` the inputs that say
    where this rank lies on them, as far as operations ask."""

    def __init__(self, namer: Namer, sizes: Mapping[str, int]) -> None:
        self.namer, self.sizes = namer, sizes
        self.ops: list[Op] = []
        self.coordinates: dict[str, Value] = {}
        self._indices: dict[tuple[str, ...], Value] = {}
        self._known: dict[Hashable, Value] = {}
        # The operation that is being made local: its place in the source, and annotations of what stands for it.
        self.loc = ""
        self.annotations: dict[str, Attr] = {}
        # What values without a name are called after; nothing for their first operand.
        self._base = ""

    @contextmanager
    def named_after(self, name: str) -> Iterator[None]:
        """Call values without a name after this one, and not after their operands."""
        before, self._base = self._base, name
        yield
        self._base = before

    def emit(self, kind: str, *ins: Value, name: str = "", **attrs: Attr) -> Value:
        """Write an operation with one result; without a name it gets a fresh one."""
        op = make(
            kind,
            ins,
            [name or self.namer.fresh(f"{self._base or _base(ins)}.{kind}")],
            self.loc,
            **attrs,
            **self.annotations,
        )
        self.ops.append(op)
        return op.outs[0]

    def emit_all(self, kind: str, *ins: Value, count: int = 2, **attrs: Attr) -> tuple[Value, ...]:
        """Write an operation with several results."""
        names = [self.namer.fresh(f"{self._base or _base(ins)}.{kind}") for _ in range(count)]
        self.ops.append(make(kind, ins, names, self.loc, **attrs, **self.annotations))
        return self.ops[-1].outs

    def put(self, op: Op) -> None:
        self.ops.append(op)

    def once(self, key: Hashable, write: Callable[[], Value]) -> Value:
        """Return the value that is written once for all operations that ask by the same key."""
        if key not in self._known:
            self._known[key] = write()
        return self._known[key]

    def parts(self, axes: tuple[str, ...]) -> int:
        return prod(self.sizes.get(axis, 1) for axis in axes)

    def present(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes with more than one device."""
        return tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)

    def number(self, value: float | int | bool, dtype: str, shape: tuple[int, ...] = ()) -> Value:
        attrs: dict[str, Attr] = {"value": value, "dtype": dtype} | ({"shape": shape} if shape else {})
        return self.emit("const", name=self.namer.fresh("local.number"), **attrs)

    def index(self, axes: tuple[str, ...]) -> Value:
        """Return the number of this rank's part among those that the axes make, the first axis major."""
        axes = self.present(axes)
        if axes not in self._indices:
            total: Value | None = None
            for axis in axes:
                at = self.coordinates.setdefault(axis, Value(f"{COORDINATE}{axis}", INDEX))
                if total is not None:
                    total = self.emit("mul", total, self.number(self.sizes[axis], "i64"))
                    at = self.emit("add", total, at)
                total = at
            self._indices[axes] = self.number(0, "i64") if total is None else total
        return self._indices[axes]

    def first(self, axes: tuple[str, ...], size: int) -> Value:
        """Return the first element of this rank's part, of `size` elements each."""
        return self.emit("mul", self.index(axes), self.number(size, "i64"))

    def numbered(self, shape: tuple[int, ...], dim: int, axes: tuple[str, ...], dtype: str = "i64") -> Value:
        """Return the numbers in the whole tensor of this rank's elements along a dimension: one entry for each of them,
        with size 1 in all other dimensions."""
        numbers = self.emit("iota", name=self.namer.fresh("local.places"), dtype="i64", shape=(shape[dim],))
        places = self.emit("add", numbers, self.first(axes, shape[dim]))
        if dtype != "i64":
            places = self.emit("cast", places, dtype=dtype)
        return self.emit("reshape", places, shape=tuple(n if i == dim else 1 for i, n in enumerate(shape)))

    def inside(self, shape: tuple[int, ...], dim: int, axes: tuple[str, ...], whole: int) -> Value:
        """Return where this rank's elements along a dimension lie inside of the tensor, and are no padding."""
        return self.emit("less", self.numbered(shape, dim, axes), self.number(whole, "i64"))

    def masked(self, x: Value, dim: int, axes: tuple[str, ...], whole: int, padding: float = 0.0) -> Value:
        """Return the value with its padding along a dimension replaced."""
        mask = self.inside(x.type.dims, dim, axes, whole)
        return self.emit("where", mask, x, self.number(typed(padding, x.type.dtype), x.type.dtype))


def _base(ins: tuple[Value, ...]) -> str:
    return ins[0].name if ins else "local"


def typed(number: float, dtype: str) -> float | int | bool:
    """Return a number as constants of an element type are written."""
    if dtype == "bool":
        return bool(number)
    return number if "f" in dtype else int(number)
