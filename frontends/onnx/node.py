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

from penstock.ir.graph import BUFFER, PARAM, Attr, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, TensorType, dtype_of

from .names import Names, legal
from .source import Source

# Constants up to this size are written into the program as `const`; larger ones become buffers beside the weights.
INLINE = 16


class Refused(Exception):
    """Why a node cannot be imported."""


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
Operand = Value | np.ndarray | bool | int | float
Result = Tensor | np.ndarray
Rule = Callable[["Node"], "Result | Sequence[Result]"]


def _is_triangle(array: np.ndarray) -> bool:
    """One number on and below the diagonal of a matrix, another one above it, as in causal masks."""
    if array.ndim < 2 or array.size != array.shape[-2] * array.shape[-1] or min(array.shape[-2:]) < 2:
        return False
    rows, columns = array.shape[-2:]
    matrix = array.reshape(rows, columns)
    return np.array_equal(matrix, np.where(np.tri(rows, columns, dtype=bool), matrix[0, 0], matrix[0, 1]))


@dataclass
class Builder:
    """The graph under construction: operations in order, variables in order of first use, and their weights."""

    source: Source
    names: Names
    opset: int
    ops: list[Op] = field(default_factory=list)
    vars: dict[str, Var] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _values: dict[str, Value] = field(default_factory=dict)

    def value_of(self, tensor: Known | Weight) -> Value:
        """The tensor as a value of the graph; the second use of the same tensor gives the same value."""
        if tensor.name not in self._values:
            name = self.names[tensor.name]
            if isinstance(tensor, Weight):
                self._values[tensor.name] = self._variable(name, tensor.type, PARAM, self.source.array(tensor.tensor))
            else:
                self._values[tensor.name] = self.constant(name, tensor.array, tensor.name)
        return self._values[tensor.name]

    def materialised(self) -> set[Value]:
        """Values that stand for known tensors and weights: they keep their names."""
        return set(self._values.values())

    def forget(self, values: set[Value]) -> None:
        """Drop values whose operations were taken back."""
        self._values = {name: value for name, value in self._values.items() if value not in values}

    def constant(self, name: str, array: np.ndarray, loc: str) -> Value:
        """A constant as an op where it is small or has one value throughout, as a buffer otherwise."""
        try:
            kind = TensorType(dtype_of(array.dtype), array.shape)
        except ValueError as error:
            raise Refused(str(error)) from error
        value: Attr
        first = array.reshape(-1)[:1]
        if array.ndim == 0 or (array.size and bool((array == first).all())):
            value = first.item()
        elif array.size <= INLINE:
            value = tuple(array.reshape(-1).tolist())
        elif _is_triangle(array):
            return self._triangle(name, array, legal(loc), kind.dtype)
        else:
            return self._variable(name, kind, BUFFER, array)
        self.ops.append(make("const", (), (name,), legal(loc), value=value, dtype=kind.dtype, shape=array.shape))
        return self.ops[-1].outs[0]

    def _triangle(self, name: str, array: np.ndarray, loc: str, dtype: str) -> Value:
        """A causal mask as a comparison of positions: it takes no memory, and passes can tell what it is."""
        lead, (rows, columns) = (1,) * (array.ndim - 2), array.shape[-2:]

        def emit(kind: str, *ins: Value, **attrs: Attr) -> Value:
            self.ops.append(make(kind, ins, (self.names.fresh(f"{name}.{kind}"),), loc, **attrs))
            return self.ops[-1].outs[0]

        row = emit("iota", dtype="i32", shape=(*lead, rows, 1), axis=array.ndim - 2)
        column = emit("iota", dtype="i32", shape=(*lead, 1, columns), axis=array.ndim - 1)
        below, above = (x.item() for x in (array[..., 0, 0].reshape(-1)[0], array[..., 0, 1].reshape(-1)[0]))
        if dtype != "bool":
            values = [emit("const", value=x, dtype=dtype) for x in (below, above)]
            self.ops.append(make("where", (emit("less_equal", column, row), *values), (name,), loc))
        else:
            kind, ins = ("less_equal", (column, row)) if below else ("less", (row, column))
            self.ops.append(make(kind, ins, (name,), loc))
        return self.ops[-1].outs[0]

    def _variable(self, name: str, kind: TensorType, role: str, array: np.ndarray) -> Value:
        self.vars[name] = Var(name, kind, role)
        self.weights[name] = array
        value = Value(name, kind)
        self.ops.append(Op("read", (), (value,), {"var": name}, name))
        return value


class Node:
    """One ONNX node under import."""

    def __init__(self, builder: Builder, proto: onnx.NodeProto, index: int) -> None:
        self._builder = builder
        self._first = len(builder.ops)
        self._attributes = {a.name: a for a in proto.attribute}
        self._asked: set[str] = set()
        self.proto = proto
        self.kind = proto.op_type
        self.name = proto.name or f"{proto.op_type}_{index}"
        self.loc = legal(self.name)
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
            try:
                return TensorType(dtype_of(tensor.array.dtype), tensor.array.shape)
            except ValueError as error:
                raise Refused(str(error)) from error
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

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise Refused(reason)

    def only_first_output(self) -> None:
        self.require(not any(self.proto.output[1:]), f"only the first result is supported, {', '.join(self.proto.output[1:])} is asked for")

    def emit(self, kind: str, *operands: Operand, **attrs: Attr) -> Value:
        """One operation with one result. Numbers among the operands take the element type of the tensors beside them."""
        return self.emit_all(kind, 1, *operands, **attrs)[0]

    def emit_all(self, kind: str, results: int, *operands: Operand, **attrs: Attr) -> tuple[Value, ...]:
        dtype = next((v.type.dtype for v in reversed(operands) if isinstance(v, Value)), "f32")
        ins = [v if isinstance(v, Value) else self.literal(v, dtype) for v in operands]
        names = [self._builder.names.fresh(f"{self._base}.{kind}") for _ in range(results)]
        op = make(kind, ins, names, self.loc, **attrs)
        self._builder.ops.append(op)
        return op.outs

    def literal(self, value: np.ndarray | bool | int | float, dtype: str) -> Value:
        """A constant of the rule's own making: a number of the given element type, or an array as it is."""
        name = self._builder.names.fresh(f"{self._base}.const")
        if isinstance(value, np.ndarray):
            return self._builder.constant(name, value, self.loc)
        number: Attr = float(value) if dtype in FLOATS else bool(value) if dtype == "bool" else int(value)
        op = make("const", (), (name,), self.loc, value=number, dtype=dtype)
        self._builder.ops.append(op)
        return op.outs[0]

    @property
    def _base(self) -> str:
        return self._builder.names[next(name for name in self.proto.output if name)]

    def abandon(self) -> None:
        """Take back what a refused rule wrote; variables it read first are dropped with their reads."""
        for op in self._builder.ops[self._first :]:
            if op.kind == "read":
                self._builder.vars.pop(op.var, None)
                self._builder.weights.pop(op.var, None)
        written = {op.outs[0] for op in self._builder.ops[self._first :]}
        self._builder.forget(written)
        del self._builder.ops[self._first :]

    def finish(self, results: Sequence[Result]) -> None:
        """Bind the results to the node's outputs; a value written by this node takes the ONNX name of the output."""
        builder = self._builder
        mine = {v for op in builder.ops[self._first :] if op.kind not in ("read",) for v in op.outs} - builder.materialised()
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
        if renamed:
            for i in range(self._first, len(builder.ops)):
                op = builder.ops[i]
                ins = tuple(renamed.get(v, v) for v in op.ins)
                outs = tuple(renamed.get(v, v) for v in op.outs)
                builder.ops[i] = Op(op.kind, ins, outs, op.attrs, op.loc)
