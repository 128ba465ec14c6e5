"""What a rule of the op tables sees: one ONNX node, its operands, and the means to write IR operations in its place.

A tensor of the ONNX graph is one of four things: `Known` (elements known at import: folded), `Weight` (a trainable initializer),
a `Value` of the IR graph, or `Lost` (the result of a node that could not be imported). Rules ask for what they need: a tensor operand
with `value`, numbers that must be known (shapes, axes, bounds) with `constant`. Only what is asked for as a tensor becomes a
variable, so that an initializer used as a shape or a bound never turns into a parameter.

A rule returns the results of its node: values, or arrays where the result is known. An attribute that no rule asked for makes the
node unsupported: nothing of a model is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from penstock.ir.graph import PARAM, Value
from penstock.ir.types import TensorType

from ..names import legal
from ..writer import Program, Refused, Writer
from .source import Source


@dataclass(frozen=True)
class Known:
    """A tensor whose elements are known at import. `name` is the ONNX tensor it came from."""

    name: str
    array: np.ndarray


@dataclass(frozen=True)
class Weight:
    """A trainable initializer; read from the file only when it is used."""

    name: str
    type: TensorType
    tensor: onnx.TensorProto


@dataclass(frozen=True)
class Lost:
    """The result of a node that was refused. `type` is what shape inference says about it, if it says anything."""

    type: TensorType | None


Tensor = Known | Weight | Value | Lost
Result = Tensor | np.ndarray
Rule = Callable[["Node"], "Result | Sequence[Result]"]


@dataclass
class Builder(Program):
    """The program under construction, and what is known of each tensor of the ONNX graph."""

    source: Source = field(kw_only=True)
    opset: int = field(kw_only=True)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _values: dict[str, Value] = field(default_factory=dict)

    def value_of(self, tensor: Known | Weight) -> Value:
        """The tensor as a value of the graph; the second use of the same tensor gives the same value."""
        if tensor.name not in self._values:
            name = self.names[tensor.name]
            if isinstance(tensor, Weight):
                self._values[tensor.name] = self.variable(name, tensor.type, PARAM, self.source.array(tensor.tensor))
            else:
                self._values[tensor.name] = self.constant(name, tensor.array, tensor.name)
        return self._values[tensor.name]

    def materialised(self) -> set[Value]:
        """Values that stand for known tensors and weights: they keep their names."""
        return set(self._values.values())

    def forget(self, values: set[Value]) -> None:
        """Drop values whose operations were taken back."""
        self._values = {name: value for name, value in self._values.items() if value not in values}


class Node(Writer):
    """One ONNX node under import."""

    def __init__(self, builder: Builder, proto: onnx.NodeProto, index: int) -> None:
        self.name = proto.name or f"{proto.op_type}_{index}"
        super().__init__(builder, legal(self.name))
        self._builder = builder
        self._attributes = {a.name: a for a in proto.attribute}
        self._asked: set[str] = set()
        self.proto = proto
        self.kind = proto.op_type
        self.opset = builder.opset
        self.wanted = sum(1 for name in proto.output if name)

    # ------------------------------------------------------------------------------------ operands

    @property
    def count(self) -> int:
        return len(self.proto.input)

    def has(self, i: int) -> bool:
        """Whether operand i is given: optional ones may be missing or empty."""
        return i < self.count and bool(self.proto.input[i])

    def tensor(self, i: int) -> Tensor:
        if not self.has(i):
            raise Refused(f"operand {i} is missing")
        return self._builder.tensors[self.proto.input[i]]

    def type(self, i: int = 0) -> TensorType:
        """Type of an operand, without making it a value."""
        tensor = self.tensor(i)
        if isinstance(tensor, Known):
            return self._builder.type_of(tensor.array)
        assert tensor.type is not None, "a node with an operand of unknown type is not imported"
        return tensor.type

    def value(self, i: int = 0) -> Value:
        """An operand as a tensor of the graph. This is what makes an initializer a parameter."""
        tensor = self.tensor(i)
        if isinstance(tensor, Value):
            return tensor
        if isinstance(tensor, Lost):
            assert tensor.type is not None
            return Value(self._builder.names[self.proto.input[i]], tensor.type)
        return self._builder.value_of(tensor)

    def values(self) -> list[Value]:
        return [self.value(i) for i in range(self.count)]

    def known(self, i: int) -> np.ndarray | None:
        """The elements of an operand that is known and not trainable; None otherwise."""
        tensor = self.tensor(i)
        return tensor.array if isinstance(tensor, Known) else None

    def constant(self, i: int, what: str) -> np.ndarray:
        """The elements of an operand that has to be known at import; a trainable initializer is read as it stands."""
        tensor = self.tensor(i)
        if isinstance(tensor, Known):
            return tensor.array
        if isinstance(tensor, Weight):
            return self._builder.source.array(tensor.tensor)
        raise Refused(f"{what} is computed at run time, it has to be known at import")

    def ints(self, i: int, what: str) -> tuple[int, ...]:
        return tuple(int(n) for n in self.constant(i, what).reshape(-1))

    def statistic(self, i: int) -> Value:
        """An operand that is not trained even when it is a floating-point initializer: it becomes a buffer."""
        tensor = self.tensor(i)
        if isinstance(tensor, Weight):
            tensor = Known(tensor.name, self._builder.source.array(tensor.tensor))
            self._builder.tensors[self.proto.input[i]] = tensor
        return self._builder.value_of(tensor) if isinstance(tensor, Known) else self.value(i)

    # ------------------------------------------------------------------------------------ attributes

    def _attribute(self, name: str, default: object) -> object:
        self._asked.add(name)
        return onnx.helper.get_attribute_value(self._attributes[name]) if name in self._attributes else default

    def int_attr(self, name: str, default: int = 0) -> int:
        return int(self._attribute(name, default))  # type: ignore[call-overload,no-any-return]

    def float_attr(self, name: str, default: float = 0.0) -> float:
        """The shortest decimal that is the stored f32 number: 1e-05, as the exporter meant it, not 9.999999747378752e-06."""
        return float(str(np.float32(self._attribute(name, default))))  # type: ignore[arg-type]

    def text_attr(self, name: str, default: str = "") -> str:
        value = self._attribute(name, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def ints_attr(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in self._attribute(name, ()))  # type: ignore[attr-defined]

    def given(self, name: str) -> bool:
        return name in self._attributes

    def raw_attr(self, name: str) -> onnx.AttributeProto:
        self._asked.add(name)
        found: onnx.AttributeProto = self._attributes[name]
        return found

    def array_attr(self, name: str) -> np.ndarray:
        return self._builder.source.array(self.raw_attr(name).t)

    def ignore(self, *names: str) -> None:
        """Attributes that change nothing of the result here."""
        self._asked.update(names)

    def unread(self) -> list[str]:
        return sorted(set(self._attributes) - self._asked)

    # ------------------------------------------------------------------------------------ results

    def only_first_output(self) -> None:
        self.require(not any(self.proto.output[1:]), f"only the first result is supported, {', '.join(self.proto.output[1:])} is asked for")

    @property
    def base(self) -> str:
        return self._builder.names[next(name for name in self.proto.output if name)]

    def abandon(self) -> set[Value]:
        gone = super().abandon()
        self._builder.forget(gone)
        return gone

    def finish(self, results: Sequence[Result]) -> None:
        """Bind the results to the node's outputs; a value written by this node takes the ONNX name of the output."""
        builder = self._builder
        mine = {v for op in self.written() if op.kind not in ("read",) for v in op.outs} - builder.materialised()
        renamed: dict[Value, Value] = {}
        for name, result in zip(self.proto.output, results, strict=False):
            if not name:
                continue
            if isinstance(result, np.ndarray):
                builder.tensors[name] = Known(name, result)
            elif isinstance(result, Value) and result in mine and result not in renamed:
                renamed[result] = Value(builder.names[name], result.type)
                builder.tensors[name] = renamed[result]
            else:
                builder.tensors[name] = renamed.get(result, result) if isinstance(result, Value) else result
        self.rename(renamed)
