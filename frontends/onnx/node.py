"""The view that a rule of the op tables has of an ONNX node: its operands, and the means to write IR operations.

Rules request an operand by use: a tensor with `value`, numbers that must be known (shapes, axes, bounds) with
`constant`. Only an operand requested as a tensor becomes a variable, so an initializer used as a shape or a bound never
becomes a parameter. tensors.py lists the kinds of operands. A node is seen in its newest form: attributes of older
opsets that are operands in newer ones are operands (versions.py).

A rule returns the results of its node: values, or arrays where the result is known. An attribute that no rule has read
makes the node unsupported: nothing of a model is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx

from penstock.frontends.names import legal
from penstock.frontends.writer import GraphWriter, Lost, Refused, Writer
from penstock.ir.graph import BUFFER, PARAM, Value
from penstock.ir.types import TensorType

from .source import OnnxFile, node_name
from .tensors import (
    Dequantised,
    Empty,
    KnownTensor,
    NeedsKnown,
    NodeUnfinished,
    OnnxWeight,
    Result,
    ScaledSums,
    ScaledTerms,
    Scope,
    Tensor,
    TensorList,
)

# The most elements that a rule may create: a file of a few bytes can ask for any number.
MOST_MADE = 1 << 22

T = TypeVar("T")
Rule = Callable[["OnnxNode"], "Result | Sequence[Result]"]


@dataclass
class OnnxBuilder(GraphWriter):
    """The program under construction. `inputs` gives the model's name of each of its inputs."""

    source: OnnxFile = field(kw_only=True)
    inputs: dict[Value, str] = field(default_factory=dict)
    # By the names of tensors: what they are in integers.
    dequantised: dict[str, Dequantised] = field(default_factory=dict)
    scaled: dict[str, ScaledSums | ScaledTerms] = field(default_factory=dict)
    # By the names of integers: the floats that stand for them, and how.
    floats: dict[str, tuple[Value, Dequantised]] = field(default_factory=dict)
    _values: dict[str, Value] = field(default_factory=dict)
    _standing: set[Value] = field(default_factory=set)

    def value_of(self, tensor: KnownTensor | OnnxWeight) -> Value:
        """Return the tensor as a value of the graph. A second use of the same tensor gives the same value."""
        if tensor.name not in self._values:
            name = self.names[tensor.name]
            if isinstance(tensor, OnnxWeight):
                self._values[tensor.name] = self.variable(name, tensor.type, PARAM, self.source.array(tensor.tensor))
            else:
                self._values[tensor.name] = self.constant(name, tensor.array, tensor.name)
            self._standing.add(self._values[tensor.name])
        return self._values[tensor.name]

    def moving(self, tensor: KnownTensor | OnnxWeight) -> tuple[Value, str]:
        """Make a stored tensor a buffer that forward changes, a variable however small it is."""
        if tensor.name in self._values:
            raise Refused(f"{tensor.name} is used elsewhere, too, and would have to be moved in training")
        array = self.source.array(tensor.tensor) if isinstance(tensor, OnnxWeight) else tensor.array
        value = self._values[tensor.name] = self.variable(self.names[tensor.name], self.type_of(array), BUFFER, array)
        self._standing.add(value)
        return value, value.name

    def stands_for_tensor(self, value: Value) -> bool:
        """Return whether a value stands for a known tensor or a weight, whose name it keeps."""
        return value in self._standing

    def forget(self, values: set[Value]) -> None:
        """Drop values whose operations were removed."""
        self._values = {name: value for name, value in self._values.items() if value not in values}
        self._standing -= values

    def inputs_behind(self, value: Value) -> list[str]:
        """List the model's inputs that a value is computed from, in the model's order."""
        reached = {value}
        for op in reversed(self.ops):
            if not reached.isdisjoint(op.outs):
                reached.update(op.ins)
        return [name for value, name in self.inputs.items() if value in reached]


class OnnxNode(Writer):
    """An ONNX node under import. `operands` are those of the node's newest form."""

    def __init__(self, builder: OnnxBuilder, proto: onnx.NodeProto, index: int, scope: Scope) -> None:
        self.own_name = node_name(proto, index)
        self.name = scope.prefix + self.own_name
        super().__init__(builder, legal(self.name))
        self._builder = builder
        self._attributes = {a.name: a for a in proto.attribute}
        self._asked: set[str] = set()
        self.scope = scope
        self.proto = proto
        self.kind = proto.op_type
        self.opset = scope.opset
        self.wanted = sum(1 for name in proto.output if name)
        self.operands = [scope.find(name) if name else None for name in proto.input]
        self._integers: Dequantised | ScaledSums | ScaledTerms | None = None

    # ------------------------------------------------------------------------------------ operands

    @property
    def count(self) -> int:
        return len(self.operands)

    def has(self, i: int) -> bool:
        """Return whether operand i is present: optional ones may be missing or empty."""
        return i < self.count and self.operands[i] is not None

    def operand(self, i: int) -> Tensor:
        """Return an operand of any kind."""
        tensor = self.operands[i] if i < self.count else None
        if tensor is None:
            raise Refused(f"operand {i} is missing")
        return tensor

    def tensor(self, i: int) -> KnownTensor | OnnxWeight | Value | Lost:
        tensor = self.operand(i)
        if isinstance(tensor, TensorList | Empty):
            raise Refused(
                f"operand {i} is {'a sequence' if isinstance(tensor, TensorList) else 'an empty optional'}, "
                "not a tensor"
            )
        return tensor

    def type(self, i: int = 0) -> TensorType:
        """Return the type of an operand without making it a value."""
        return self.type_of(self.tensor(i))

    def type_of(self, tensor: KnownTensor | OnnxWeight | Value | Lost) -> TensorType:
        if isinstance(tensor, KnownTensor):
            return self._builder.type_of(tensor.array)
        assert tensor.type is not None, "a node with an operand of unknown type is not imported"
        return tensor.type

    def value(self, i: int = 0) -> Value:
        """Return an operand as a tensor of the graph. This is the step that makes an initializer a parameter."""
        return self.value_of(self.tensor(i))

    def value_of(self, tensor: KnownTensor | OnnxWeight | Value | Lost) -> Value:
        if isinstance(tensor, Value):
            return tensor
        if isinstance(tensor, Lost):  # the node is only checked: the import fails anyway
            assert tensor.type is not None
            return Value(self._builder.names.fresh("lost"), tensor.type)
        return self._builder.value_of(tensor)

    def values(self) -> list[Value]:
        return [self.value(i) for i in range(self.count)]

    def known(self, i: int) -> np.ndarray | None:
        """Return the elements of an operand that is known and not trainable, else None."""
        tensor = self.tensor(i)
        return tensor.array if isinstance(tensor, KnownTensor) else None

    def constant(self, i: int, what: str) -> np.ndarray:
        """Return the elements of an operand that must be known at import. A trainable initializer is read as it is."""
        return self.constant_of(self.tensor(i), what)

    def constant_of(self, tensor: Tensor, what: str) -> np.ndarray:
        if isinstance(tensor, KnownTensor):
            return tensor.array
        if isinstance(tensor, OnnxWeight):
            return self._builder.source.array(tensor.tensor)
        if isinstance(tensor, Lost):
            raise NodeUnfinished
        behind = self._builder.inputs_behind(tensor) if isinstance(tensor, Value) else []
        if not behind:
            raise Refused(f"{what} is computed at run time, it has to be known at import")
        raise NeedsKnown.of({what: behind}, self._builder.inputs.values())

    def ints(self, i: int, what: str) -> tuple[int, ...]:
        return tuple(int(n) for n in self.constant(i, what).reshape(-1))

    def constants(self, wanted: Mapping[int, str]) -> dict[int, np.ndarray]:
        """Return the elements of those of these operands that are present, as `constant` does.

        One error names all that must be known, and the inputs that they are computed from.
        """
        arrays: dict[int, np.ndarray] = {}
        unknown: dict[str, tuple[str, ...]] = {}
        for i, what in wanted.items():
            try:
                if self.has(i):
                    arrays[i] = self.constant(i, what)
            except NeedsKnown as error:
                unknown[what] = error.inputs
        if unknown:
            raise NeedsKnown.of(unknown, self._builder.inputs.values())
        return arrays

    def all_ints(self, wanted: Mapping[int, str]) -> dict[int, tuple[int, ...]]:
        return {i: tuple(int(n) for n in array.reshape(-1)) for i, array in self.constants(wanted).items()}

    def room(self, count: int) -> int:
        """Refuse to create too many elements at import; else return their number."""
        self.require(
            0 <= count <= MOST_MADE, f"{count} numbers would have to be made at import, at most {MOST_MADE} are"
        )
        return count

    def statistic(self, i: int) -> Value:
        """Return an operand that is not trained even if it is a floating-point initializer: it becomes a buffer."""
        tensor = self.tensor(i)
        if isinstance(tensor, OnnxWeight):
            tensor = KnownTensor(tensor.name, self._builder.source.array(tensor.tensor))
            self.scope.replace(self.proto.input[i], tensor)
            self.operands[i] = tensor
        return self._builder.value_of(tensor) if isinstance(tensor, KnownTensor) else self.value(i)

    def moving_statistic(self, i: int) -> tuple[Value, str | None]:
        """Return a statistic that this node changes, and its variable.

        The variable is None if the statistic is computed, or an input of the model.
        """
        tensor = self.tensor(i)
        if not isinstance(tensor, OnnxWeight | KnownTensor):
            return self.value(i), None
        return self._builder.moving(tensor)

    def add_operand(self, i: int, array: np.ndarray) -> None:
        """Set operand i, which the node as written lacks."""
        self.operands.extend([None] * (i + 1 - self.count))
        self.operands[i] = self.known_of(array)

    def known_of(self, array: np.ndarray) -> KnownTensor:
        """Make a known tensor from elements that this node creates."""
        return KnownTensor(self._builder.names.new(f"{self.base}.known"), array)

    def cache(self, name: str, dtype: str, dims: tuple[int, ...]) -> str:
        """Add a cache, whose name begins like that. Return its name."""
        name = self._builder.names.fresh(name)
        self._builder.cache(name, TensorType(dtype, dims))
        return name

    def dequantised(self, i: int) -> Dequantised | None:
        """Return what operand i was dequantised from, if it was."""
        tensor = self.operands[i] if i < self.count else None
        return self._builder.dequantised.get(tensor.name) if isinstance(tensor, KnownTensor | Value) else None

    def scaled(self, i: int) -> ScaledSums | ScaledTerms | None:
        """Return the integers that operand i is made of by products and sums, if it is."""
        tensor = self.operands[i] if i < self.count else None
        return self._builder.scaled.get(tensor.name) if isinstance(tensor, Value) else None

    def floats_of(self, i: int) -> tuple[Value, Dequantised] | None:
        """Return the floats that stand for the integers of operand i, if some were computed, and how they do."""
        tensor = self.operands[i] if i < self.count else None
        return self._builder.floats.get(tensor.name) if isinstance(tensor, Value) else None

    @contextmanager
    def reading(self, i: int, tensor: Tensor) -> Iterator[None]:
        """Read another tensor as operand i."""
        kept, self.operands[i] = self.operands[i], tensor
        try:
            yield
        finally:
            self.operands[i] = kept

    def remember(self, integers: Dequantised | ScaledSums | ScaledTerms) -> None:
        """Record what the first result is in integers, once it has its name."""
        self._integers = integers

    def once(self, key: tuple[object, ...], operands: Sequence[int], make: Callable[[], T]) -> T:
        """Return what `make` gives for stored operands, which is made once for all imports of a file."""
        stored = [tensor for i in operands if (tensor := self.operands[i] if i < self.count else None) is not None]
        names = tuple(tensor.name for tensor in stored if isinstance(tensor, KnownTensor | OnnxWeight))
        source = self._builder.source
        known = len(names) == len(stored) and source.stores(names)
        return source.once((*key, *names), make) if known else make()

    # ------------------------------------------------------------------------------------ attributes

    def _attribute(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        return onnx.helper.get_attribute_value(self._attributes[name]) if name in self._attributes else default

    def int_attr(self, name: str, default: int = 0) -> int:
        return int(self._attribute(name, default))

    def float_attr(self, name: str, default: float = 0.0) -> float:
        """Return the shortest decimal that is the stored f32 number.

        That is 1e-05, as exporters write it, not 9.999999747378752e-06.
        """
        return float(str(np.float32(self._attribute(name, default))))

    def text_attr(self, name: str, default: str = "") -> str:
        value = self._attribute(name, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def ints_attr(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in self._attribute(name, ()))

    def floats_attr(self, name: str) -> tuple[float, ...]:
        return tuple(float(str(np.float32(x))) for x in self._attribute(name, ()))

    def float_array(self, name: str) -> np.ndarray:
        """Return the stored f32 numbers as they are."""
        return np.array(self._attribute(name, ()), np.float32).reshape(-1)

    def texts_attr(self, name: str) -> tuple[str, ...]:
        return tuple(x.decode(errors="replace") for x in self._attribute(name, ()))

    def given(self, name: str) -> bool:
        return name in self._attributes

    def raw_attr(self, name: str) -> onnx.AttributeProto:
        self._asked.add(name)
        attribute: onnx.AttributeProto = self._attributes[name]
        return attribute

    def array_attr(self, name: str) -> np.ndarray:
        return self._builder.source.array(self.raw_attr(name).t)

    def ignore(self, *names: str) -> None:
        """Mark attributes as read that do not change the result here."""
        self._asked.update(names)

    def drop(self, name: str) -> None:
        """Remove an attribute that an operand has replaced."""
        self._attributes.pop(name, None)

    @property
    def attributes(self) -> list[onnx.AttributeProto]:
        return list(self._attributes.values())

    def unread(self) -> list[str]:
        return sorted(set(self._attributes) - self._asked)

    # ------------------------------------------------------------------------------------ results

    def only_first_output(self) -> None:
        self.require(
            not any(self.proto.output[1:]),
            f"only the first result is supported, {', '.join(self.proto.output[1:])} is asked for",
        )

    @property
    def base(self) -> str:
        first = next((name for name in self.proto.output if name), self.kind)
        return self.scope.prefix + first if self.scope.prefix else self._builder.names[first]

    def abandon(self) -> set[Value]:
        gone = super().abandon()
        self._builder.forget(gone)
        return gone

    def _label(self, name: str) -> str:
        """Return a result's name among all tensors: its own in the model's graph, a new one in other graphs."""
        return self._builder.names.new(self.scope.prefix + name) if self.scope.prefix else name

    def finish(self, results: Sequence[Result]) -> None:
        """Bind the results to the node's outputs. A value written by this node takes the ONNX name of the output."""
        builder, tensors = self._builder, self.scope.tensors
        mine = {v for op in self.written() if op.kind != "read" for v in op.outs}
        renamed: dict[Value, Value] = {}
        bound = [(name, result) for name, result in zip(self.proto.output, results, strict=False) if name]
        for name, result in bound:
            if isinstance(result, np.ndarray):
                tensors[name] = KnownTensor(self._label(name), result)
            elif (
                isinstance(result, Value)
                and result in mine
                and result not in renamed
                and not builder.stands_for_tensor(result)
            ):
                tensors[name] = renamed[result] = Value(builder.names[self._label(name)], result.type)
            else:
                tensors[name] = result
        for name, _ in bound:
            tensors[name] = _with_names(tensors[name], renamed)
        self.rename(renamed)
        first = tensors.get(self.proto.output[0]) if self.proto.output else None
        if isinstance(first, KnownTensor | Value):
            if isinstance(self._integers, Dequantised):
                builder.dequantised[first.name] = self._integers
                if isinstance(first, Value) and isinstance(integers := self._integers.integers, Value):
                    builder.floats.setdefault(integers.name, (first, self._integers))
            elif self._integers is not None:
                builder.scaled[first.name] = self._integers


def _with_names(tensor: Tensor | None, renamed: Mapping[Value, Value]) -> Tensor | None:
    if isinstance(tensor, TensorList):
        return TensorList(tuple(t for t in (_with_names(item, renamed) for item in tensor.items) if t is not None))
    return renamed.get(tensor, tensor) if isinstance(tensor, Value) else tensor


__all__ = ["OnnxBuilder", "OnnxNode", "Result", "Rule"]
