"""Ways to damage a model file, drawn with a seeded generator.

Some work on bytes, which mostly gives files that cannot be read; the others on the fields of the messages inside, which gives files that can
be read and mean nothing, or something else. `damaged` applies one to three of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from google.protobuf.message import DecodeError, EncodeError, Message

_WHOLE = (
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    255,
    65536,
    2**31 - 1,
    2**31,
    -(2**31),
    10**9,
    10**12,
    2**53,
    2**62,
    2**63 - 1,
    -(2**63),
)
_REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"), 1e9)
_LOCATIONS = (
    "", ".", "..", "/", "//", "../data.bin", "more/../data.bin", "more/../../data.bin", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem",
    "C:\\data.bin", "\\\\host\\share", "..\\data.bin", "data.bin\0", "\0", "data.bin/", "more", "model.onnx", "~/data.bin", "file:///etc/passwd",
    "a" * 5000, "link.bin", "pipe", "up/data.bin", "./data.bin", "more//bias.bin", "%2e%2e/data.bin", "データ", "data.bin\n",
)  # fmt: skip
Draw = random.Random
Model = onnx.ModelProto


def damaged(content: bytes, draw: Draw) -> bytes:
    """The content after one to three kinds of damage."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if draw.random() < 0.25:
            content = draw.choice(_ON_BYTES)(content, draw)
            continue
        model = onnx.ModelProto()
        try:
            model.ParseFromString(content)
            draw.choice(_ON_MODELS)(model, draw)
            content = model.SerializeToString()
        except (
            DecodeError,
            EncodeError,
            ValueError,
            TypeError,
        ):  # what went before left no model, or text that cannot be stored
            content = draw.choice(_ON_BYTES)(content, draw)
    return content


# ---------------------------------------------------------------------------------------- bytes


def _flip(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(content: bytes, draw: Draw) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _move(content: bytes, draw: Draw) -> bytes:
    """A piece taken out, doubled, or overwritten by another one."""
    start, length, other = (draw.randrange(len(content) + 1) for _ in range(3))
    length %= 64
    piece = content[start : start + length]
    kind = draw.randrange(3)
    if kind == 0:
        return content[:start] + content[start + length :]
    if kind == 1:
        return content[:other] + piece + content[other:]
    return content[:other] + piece + content[other + len(piece) :]


_ON_BYTES: tuple[Callable[[bytes, Draw], bytes], ...] = (_flip, _flip, _truncate, _move)


# ---------------------------------------------------------------------------------------- fields


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _fields(model: Message) -> list[tuple[Message, Any]]:
    return [(message, field) for message in _messages(model) for field, _ in message.ListFields()]


def _of(model: Model, kind: type) -> list[Any]:
    return [message for message in _messages(model) if isinstance(message, kind)]


def _drop(model: Model, draw: Draw) -> None:
    message, field = draw.choice(_fields(model))
    value = getattr(message, field.name)
    if field.is_repeated and len(value) and draw.random() < 0.7:
        del value[draw.randrange(len(value))]
    else:
        message.ClearField(field.name)


def _scramble(model: Model, draw: Draw) -> None:
    """A number, text or enumeration gets another value; a message is replaced by another one of its type, or doubled."""
    message, field = draw.choice(_fields(model))
    value = getattr(message, field.name)
    if field.message_type is not None:
        other = draw.choice(_of(model, type(value[0]) if field.is_repeated else type(value)))
        if field.is_repeated and draw.random() < 0.5:
            value.add().CopyFrom(type(other).FromString(other.SerializeToString()))
        else:
            target = draw.choice(value) if field.is_repeated else value
            target.CopyFrom(type(other).FromString(other.SerializeToString()))
    elif field.is_repeated:
        value[draw.randrange(len(value))] = _other(model, field, draw)
    else:
        setattr(message, field.name, _other(model, field, draw))


def _other(model: Model, field: Any, draw: Draw) -> Any:
    kind = field.cpp_type
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return draw.choice(_REAL)
    if kind == field.CPPTYPE_ENUM:
        return draw.choice(field.enum_type.values).number
    if kind == field.CPPTYPE_STRING and field.type == field.TYPE_BYTES:
        return bytes(draw.randrange(256) for _ in range(draw.choice((0, 1, 3, 8, 100))))
    if kind == field.CPPTYPE_STRING:
        return draw.choice((*_names(model), "", "x", "a" * 1000, "größe", "\0", "a b;\n"))
    if kind in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32):
        return draw.choice((*range(-1 if kind == field.CPPTYPE_INT32 else 0, 30), 255, 2**31 - 1))
    return draw.choice([n for n in _WHOLE if kind == field.CPPTYPE_INT64 or n >= 0] or [0])


def _names(model: Model) -> list[str]:
    return [name for node in _of(model, onnx.NodeProto) for name in (*node.input, *node.output)]


def _rewire(model: Model, draw: Draw) -> None:
    """Nodes read or write other tensors, change places, or become another operator."""
    nodes = _of(model, onnx.NodeProto)
    if not nodes:
        return
    node, kind = draw.choice(nodes), draw.randrange(6)
    if kind <= 1 and node.input:
        node.input[draw.randrange(len(node.input))] = draw.choice(_names(model))
    elif kind == 2 and node.output:
        node.output[draw.randrange(len(node.output))] = draw.choice(_names(model))
    elif kind == 3:
        node.op_type = draw.choice(onnx.defs.get_all_schemas()).name
    elif kind == 4:
        other = draw.choice(nodes)
        kept = node.SerializeToString()
        node.CopyFrom(onnx.NodeProto.FromString(other.SerializeToString()))
        if draw.random() < 0.5:
            other.CopyFrom(onnx.NodeProto.FromString(kept))
    elif draw.random() < 0.5:
        node.input.append(draw.choice((*_names(model), "")))
    else:
        node.output.append(draw.choice((*_names(model), "", "another")))


def _attributes(model: Model, draw: Draw) -> None:
    """An attribute of some operator on some node, or another value for one that is there."""
    nodes = [node for node in _of(model, onnx.NodeProto) if onnx.defs.has(node.op_type)]
    if not nodes:
        return
    node = draw.choice(nodes)
    schema = onnx.defs.get_schema(node.op_type)
    name = draw.choice([*schema.attributes, *(a.name for a in node.attribute), "axis"])
    value: Any = draw.choice(
        (
            draw.choice(_WHOLE),
            draw.choice(_REAL),
            "text",
            [1, 2],
            [draw.choice(_WHOLE) for _ in range(3)],
            [0.5],
            b"\xff",
            ["a"],
        )
    )
    for old in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(old)
    node.attribute.append(onnx.helper.make_attribute(name, value))


def _shapes(model: Model, draw: Draw) -> None:
    """Another size for a dimension of an input or of a stored tensor."""
    dims = _of(model, onnx.TensorShapeProto.Dimension)
    tensors = [t for t in _of(model, onnx.TensorProto) if t.dims]
    size = draw.choice((*_WHOLE, 0, 1, 2, 3, 4, 5))
    if tensors and (not dims or draw.random() < 0.5):
        tensor = draw.choice(tensors)
        tensor.dims[draw.randrange(len(tensor.dims))] = size
    elif dims:
        draw.choice(dims).dim_value = size


def _numbers(model: Model, draw: Draw) -> None:
    """Other elements in a small tensor of integers: sizes, axes, indices, repetitions."""
    kinds = {onnx.TensorProto.INT64: 8, onnx.TensorProto.INT32: 4}
    tensors = [
        t
        for t in _of(model, onnx.TensorProto)
        if t.data_type in kinds and (t.int64_data or t.int32_data or len(t.raw_data) >= 8)
    ]
    if not tensors:
        return _shapes(model, draw)
    tensor, value = draw.choice(tensors), draw.choice(_WHOLE)
    width = kinds[tensor.data_type]
    small = max(-(1 << (8 * width - 1)), min((1 << (8 * width - 1)) - 1, value))
    if tensor.raw_data:
        at = draw.randrange(max(1, len(tensor.raw_data) // width)) * width
        tensor.raw_data = (
            tensor.raw_data[:at] + small.to_bytes(width, "little", signed=True) + tensor.raw_data[at + width :]
        )
    else:
        data = tensor.int64_data if tensor.int64_data else tensor.int32_data
        data[draw.randrange(len(data))] = small
    return None


def _versions(model: Model, draw: Draw) -> None:
    if model.opset_import and draw.random() < 0.8:
        draw.choice(model.opset_import).version = draw.choice((*range(1, 30), 0, -1, 2**40))
    else:
        model.ir_version = draw.choice((*range(15), 2**40, -1))


def _locations(model: Model, draw: Draw) -> None:
    """Where external data lies, for a tensor that has some, or for one that has none."""
    tensors = _of(model, onnx.TensorProto)
    if not tensors:
        return _drop(model, draw)
    tensor = draw.choice([t for t in tensors if t.external_data] or tensors)
    fields = {entry.key: entry.value for entry in tensor.external_data} or {"location": "data.bin", "offset": "0"}
    kind = draw.randrange(4)
    if kind <= 1:
        fields["location"] = draw.choice(_LOCATIONS)
    else:
        fields[draw.choice(("offset", "length"))] = draw.choice(
            (*map(str, _WHOLE), "", "x", "1e3", "0x10", " 5", "٣", "9" * 5000)
        )
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, text in fields.items():
        tensor.external_data.add(key=key, value=text)
    return None


def _nest(model: Model, draw: Draw) -> None:
    """The whole graph inside branches of conditions, or inside loops, many levels deep."""
    depth = draw.choice((1, 3, 20, 24, 40, 200))
    outs = [value.name for value in model.graph.output]
    for level in range(depth):
        inner = onnx.GraphProto.FromString(model.graph.SerializeToString())
        inputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in inner.input]
        del inner.input[:]
        condition = onnx.helper.make_node(
            "Constant", [], [f"if{level}"], value=onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [], [True])
        )
        node = onnx.helper.make_node(
            "If", [f"if{level}"], outs, then_branch=inner, else_branch=inner if depth < 4 else onnx.GraphProto(name="e")
        )
        outer = onnx.helper.make_graph([condition, node], "outer", inputs, list(inner.output))
        model.graph.CopyFrom(outer)


_ON_MODELS: tuple[Callable[[Model, Draw], None], ...] = (
    _drop, _drop, _scramble, _scramble, _scramble, _rewire, _rewire, _rewire, _attributes, _attributes, _shapes, _numbers, _numbers, _versions,
    _locations, _nest,
)  # fmt: skip
