"""The view that a rule of the ATen tables has of a call: its arguments by name, and the means to write operations.

An argument that stands for a tensor has one of four types. `KnownElements` has elements that are known at import, and
`TorchWeight` is a parameter. A `Value` belongs to the IR graph. `Lost` is the result of a call that could not be
imported. All other arguments (numbers, lists, element types, None) are Python objects. Sizes are numbers.

Rules request an argument by use: a tensor with `value`, other objects with `arg`. Only an argument requested as a
tensor becomes a variable. An argument that no rule has read and that differs from its default makes the call
unsupported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.fx import Node as Call

from penstock.frontends.names import legal
from penstock.frontends.writer import GraphWriter, Lost, Operand, Refused, Writer
from penstock.ir.graph import PARAM, Value
from penstock.ir.types import TensorType

from .arrays import array_of, our_dtype, their_dtype


@dataclass(frozen=True)
class KnownElements:
    """A tensor whose elements are known at import. `name` is legal and unique."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class TorchWeight:
    """A parameter that is trained. `name` is its first name in the state dict, made legal."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Absent:
    """A result that a rule does not compute, and why: its use is an error."""

    reason: str


# KnownElements, TorchWeight, Value or Lost; torch.Tensor where the elements are known; Absent, a number, or None.
Result = Any
Rule = Callable[["TorchNode"], Result]

# Arguments that say where and how elements are stored, not their values.
_STORAGE = ("layout", "device", "pin_memory", "memory_format", "non_blocking", "requires_grad", "sparse")


def type_of(tensor: torch.Tensor) -> TensorType:
    try:
        return TensorType(our_dtype(tensor.dtype), tuple(tensor.shape))
    except ValueError as error:
        raise Refused(str(error)) from error


@dataclass
class TorchBuilder(GraphWriter):
    """The graph under construction.

    `env` maps each node of the source to a tensor, a Python object, or a tuple of these.
    """

    # A graph that is for inference alone has parameters, but none that is trained.
    trains = True
    # The element type of caches.
    cache_dtype: str = "f32"
    env: dict[Call, Any] = field(default_factory=dict)
    trained: set[Value] = field(default_factory=set)
    _values: dict[tuple[str, str], Value] = field(default_factory=dict)

    def value_of(self, tensor: KnownElements | TorchWeight, dtype: str | None = None) -> Value:
        """Return the tensor as a value of the graph, in that element type. A second use gives the same value."""
        kind = type_of(tensor.tensor)
        dtype = dtype or kind.dtype
        key = (tensor.name, dtype)
        if key not in self._values:
            if isinstance(tensor, TorchWeight):
                value = self.variable(tensor.name, kind, PARAM, self.elements(tensor))
                self.trained.add(value)
            else:
                elements = tensor.tensor if dtype == kind.dtype else tensor.tensor.to(their_dtype(dtype))
                name = tensor.name if dtype == kind.dtype else self.names.fresh(tensor.name)
                value = self.constant(name, array_of(elements), tensor.name)
            self._values[key] = value
        return self._values[key]

    def elements(self, weight: TorchWeight) -> np.ndarray:
        """Return the elements of a parameter."""
        return array_of(weight.tensor)

    def materialised(self) -> set[Value]:
        return set(self._values.values())

    def forget(self, values: set[Value]) -> None:
        """Drop values whose operations were removed."""
        self._values = {key: value for key, value in self._values.items() if value not in values}

    def depends(self, values: Sequence[Value]) -> bool:
        """Return whether any of these depends on a parameter that is trained."""
        return not self.trained.isdisjoint(values)


class TorchNode(Writer):
    """One call under import."""

    def __init__(self, builder: TorchBuilder, call: Call, loc: str) -> None:
        super().__init__(builder, legal(loc))
        self._builder = builder
        self._asked: set[str] = set(_STORAGE)
        self.call = call
        self.target = call.target
        schema = call.target._schema.arguments  # type: ignore[union-attr]
        self._defaults = {a.name: a.default_value for a in schema}
        passed = dict(zip((a.name for a in schema), call.args, strict=False)) | call.kwargs
        self._args = {name: self._resolve(value) for name, value in (self._defaults | passed).items()}

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Call):
            return self._builder.env[value]
        if isinstance(value, list | tuple):
            return [self._resolve(v) for v in value]
        if isinstance(value, slice):
            return slice(*(self._resolve(v) for v in (value.start, value.stop, value.step)))
        return value

    # ------------------------------------------------------------------------------------ arguments

    def arg(self, name: str, default: Any = None) -> Any:
        """Return an argument as it is, or `default` where it is None or the operation has none of that name."""
        self._asked.add(name)
        value = self._args.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return self.arg(name) is not None

    def operands(self) -> list[Any]:
        """Return all arguments, resolved."""
        return list(self._args.values())

    def ints(self, name: str) -> tuple[int, ...]:
        value = self.arg(name, ())
        return tuple(int(n) for n in value) if isinstance(value, list | tuple) else (int(value),)

    def type(self, name: str = "self") -> TensorType:
        tensor = self.arg(name)
        if isinstance(tensor, KnownElements | TorchWeight):
            return type_of(tensor.tensor)
        if isinstance(tensor, Value | Lost):
            assert tensor.type is not None, "a call with an operand of unknown type is not imported"
            return tensor.type
        if isinstance(tensor, Absent):
            raise Refused(tensor.reason)
        raise Refused(f"{name} must be a tensor, got {tensor!r}")

    def tensor_value(self, tensor: Any, dtype: str | None = None) -> Value:
        """Return any tensor as a value of the graph, cast if it has another element type."""
        if isinstance(tensor, KnownElements):
            return self._builder.value_of(tensor, dtype)
        if isinstance(tensor, TorchWeight):
            tensor = self._builder.value_of(tensor)
        elif isinstance(tensor, Lost):
            assert tensor.type is not None
            tensor = Value(self._builder.names.fresh("lost"), tensor.type)
        elif isinstance(tensor, Absent):
            raise Refused(tensor.reason)
        if not isinstance(tensor, Value):
            raise Refused(f"expected a tensor, got {tensor!r}")
        return tensor if dtype is None else self.cast(tensor, dtype)

    def value(self, name: str = "self", dtype: str | None = None) -> Value:
        """Return an argument as a tensor of the graph. This is the step that makes a parameter a variable."""
        return self.tensor_value(self.arg(name), dtype)

    def values(self, name: str, dtype: str | None = None) -> list[Value]:
        return [self.tensor_value(t, dtype) for t in self.arg(name, [])]

    def operand(self, name: str, dtype: str) -> Operand:
        """Return an argument that may be a tensor or a number, as an operand of that element type."""
        value = self.arg(name)
        return value if isinstance(value, bool | int | float) else self.tensor_value(value, dtype)

    def known(self, name: str) -> torch.Tensor | None:
        """Return the elements of an argument that is known, else None."""
        tensor = self.arg(name)
        return tensor.tensor if isinstance(tensor, KnownElements) else None

    def is_trained(self, name: str = "self") -> bool:
        """Return whether an argument depends on a parameter that is trained."""
        tensor = self.arg(name)
        depends = isinstance(tensor, TorchWeight) or (isinstance(tensor, Value) and self._builder.depends([tensor]))
        return depends and self._builder.trains

    def weight(self, name: str) -> torch.Tensor | None:
        """Return the elements of a parameter or known tensor at import, else None."""
        tensor = self.arg(name)
        return tensor.tensor if isinstance(tensor, KnownElements | TorchWeight) else None

    def is_used(self, i: int) -> bool:
        """Return whether result i, one of several, is used."""
        return any(user.args[1] == i for user in self.call.users if user.target is operator.getitem)

    def cache(self, name: str, dims: tuple[int, ...]) -> str:
        """Add a cache, whose name begins like that. Return its name."""
        name = self._builder.names.fresh(name)
        self._builder.cache(name, TensorType(self._builder.cache_dtype, dims))
        return name

    def ignore(self, *names: str) -> None:
        """Mark arguments as read that do not change the result here."""
        self._asked.update(names)

    def unread(self) -> list[str]:
        return sorted(
            n for n, v in self._args.items() if n not in self._asked and v is not None and v != self._defaults[n]
        )

    # ------------------------------------------------------------------------------------ types

    @property
    def names(self) -> dict[str, Any]:
        """The operation's arguments, with their defaults."""
        return self._defaults

    def fresh(self, what: str) -> str:
        """Make a name for a tensor that a rule creates."""
        return self._builder.names.fresh(f"{self.base}.{what}")

    def dtype_of(self, tensor: Any) -> str:
        return tensor.type.dtype if isinstance(tensor, Value) else type_of(tensor.tensor).dtype

    @property
    def dtype(self) -> str:
        """The element type of the (first) result, as torch gives it."""
        result = self.call.meta["val"]
        result = result[0] if isinstance(result, tuple | list) else result
        return self.theirs(result.dtype)

    def theirs(self, dtype: torch.dtype) -> str:
        try:
            return our_dtype(dtype)
        except ValueError as error:
            raise Refused(str(error)) from error

    def common(self, *names: str) -> str:
        """Return the element type in which torch computes with these two arguments.

        Tensors of rank 0 and numbers yield to other tensors.
        """
        metas = [self.meta(name) for name in names]
        return self.theirs(torch.result_type(*metas))

    def meta(self, name: str) -> Any:
        """Return torch's description of an argument: a tensor with its type and strides, or the number."""
        self._asked.add(name)
        index = list(self._defaults).index(name)
        argument = (
            self.call.args[index] if index < len(self.call.args) else self.call.kwargs.get(name, self._defaults[name])
        )
        if not isinstance(argument, Call):
            return argument
        description = argument.meta["val"]
        return description if isinstance(description, torch.Tensor) else self._builder.env[argument]

    # ------------------------------------------------------------------------------------ results

    @property
    def base(self) -> str:
        return self.call.name

    def abandon(self) -> set[Value]:
        gone = super().abandon()
        self._builder.forget(gone)
        return gone

    def finish(self, result: Result) -> Any:
        """Return the result for `env`. The first value written here takes the name of the call."""
        builder = self._builder
        ops = [op for op in self.written() if op.kind != "read"]
        trained = builder.trained
        for op in ops:
            if not trained.isdisjoint(op.ins):
                trained.update(op.outs)
        mine = {v for op in ops for v in op.outs} - builder.materialised()
        several = isinstance(result, list | tuple)
        renamed: dict[Value, Value] = {}
        bound = []
        for i, entry in enumerate(result if several else (result,)):
            name = f"{self.call.name}.{i}" if several else self.call.name
            if isinstance(entry, torch.Tensor):
                entry = KnownElements(builder.names.fresh(name), entry)
            elif isinstance(entry, Value) and entry in mine and entry not in renamed:
                renamed[entry] = Value(builder.names.fresh(name), entry.type)
            bound.append(entry)
        self.rename(renamed)
        trained.update(new for old, new in renamed.items() if old in trained)
        bound = [renamed.get(entry, entry) if isinstance(entry, Value) else entry for entry in bound]
        return tuple(bound) if several else bound[0]
