"""The structure of a model file without the elements of its weights, kept in a bundle to write trained models from.

    take_structure   the file as it was read, and the module's variables -> Structure: the model without the elements of
                     the initializers that became variables; everything else, also local functions and subgraphs, stays
    save_structure   Structure -> `model.onnx` in a folder, and `model.onnx.data` where elements that stay were external
    write_model      such a `model.onnx`, and elements for initializers by label -> an ONNX file a user can deploy

Elements are written little-endian as raw data, in the element type of the initializer. External data stays external, in
one file beside the model with `.data` appended to its name. If the model would not fit into the 2 GiB of a protobuf
message, all filled-in tensors of 1 KiB and more become external too. Both files are written under temporary names,
flushed and renamed, the model last: at no time does a model stand beside elements of another.

A variable belongs to the one initializer with its name and type, in any graph. Initializers of one name in several
graphs are distinguished by the place of their graph (source.stored_in). Variables that were computed at import belong
to none. Nor do those of graphs inside local functions, which may be called more than once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx.helper import tensor_dtype_to_np_dtype

from penstock.ir.types import TensorType
from penstock.support.errors import UsageError, VerifyError

from .source import OnnxFile, stored_in

MODEL = "model.onnx"
# A protobuf message cannot be larger. Inline elements must leave room for the keys and lengths of its fields.
LARGEST_MESSAGE = 2**31 - 2**20
_SMALL = 1024
_ALIGNMENT = 64
_CHUNK = 1 << 24
_ELEMENTS = (
    "raw_data",
    "float_data",
    "int32_data",
    "int64_data",
    "double_data",
    "uint64_data",
    "string_data",
    "external_data",
)

# A file, an offset and a number of bytes.
Span = tuple[Path, int, int]
# An initializer whose elements become external data, and these.
Filled = tuple[onnx.TensorProto, np.ndarray]


@dataclass(frozen=True)
class Structure:
    """A model without the elements of its variables.

    `model` is the serialised model. `initializers` maps variables to the labels of the initializers that have lost
    their elements. `spans` says where the elements of the remaining external tensors are, in the order of the file.
    """

    model: bytes
    initializers: Mapping[str, str]
    spans: tuple[Span, ...]


def take_structure(
    model: onnx.ModelProto, source: OnnxFile, types: Mapping[str, TensorType], names: Mapping[str, str]
) -> Structure:
    """Remove the elements of variables from `model`, which is of no other use afterwards.

    `types` are those of the variables. `names` gives the file's label of each variable that is named otherwise.
    """
    tensors = _labelled(model)
    initializers: dict[str, str] = {}
    for variable, kind in types.items():
        label = names.get(variable, variable)
        tensor = tensors.get(label)
        if tensor is not None and _has_type(source, tensor, kind):
            initializers[variable] = label
            for field in _ELEMENTS:
                tensor.ClearField(field)
    spans = [source.external(tensor) for tensor in _external(model) if tensor.external_data]
    return Structure(model.SerializeToString(deterministic=True), initializers, tuple(spans))


def _has_type(source: OnnxFile, tensor: onnx.TensorProto, kind: TensorType) -> bool:
    try:
        return source.type_of(tensor) == kind
    except ValueError:  # an element type that no variable has
        return False


def save_structure(structure: Structure, folder: Path, arrays: Mapping[str, np.ndarray]) -> list[Path]:
    """Write the structure that a bundle keeps. `arrays`, by label, are elements that the bundle holds nowhere else."""
    return _write(onnx.ModelProto.FromString(structure.model), arrays, structure.spans, folder / MODEL)


def write_model(
    structure: Path,
    arrays: Mapping[str, np.ndarray],
    out: Path,
    annotate: Callable[[onnx.ModelProto], None] | None = None,
) -> list[Path]:
    """Write the model whose structure is in the file `structure`, and return the files written.

    `arrays` are by label, for all initializers whose elements were left out. `annotate` may change the model in ways
    that leave its meaning alone.
    """
    model = _read(structure)
    if annotate is not None:
        annotate(model)
    spans = [_kept_span(tensor, structure) for tensor in _external(model) if tensor.external_data]
    return _write(model, arrays, spans, out)


def data_file(model: Path) -> Path:
    """Return the path of a model's external data."""
    return model.with_name(model.name + ".data")


# ------------------------------------------------------------------------------------------------ what a model stores


def _labelled(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Map unique labels to initializers, in any graph of the model."""
    return {label: tensor for label, _, tensor in stored_in(model.graph)}


def _external(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield the tensors anywhere in a message whose elements are external data, in the order of the file."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in (value,) if isinstance(value, Message) else value:
                yield from _external(inner)


def _read(structure: Path) -> onnx.ModelProto:
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(structure.read_bytes())
    except DecodeError as error:
        raise VerifyError(f"not a readable ONNX file: {error}", where=str(structure)) from error
    return model


def _kept_span(tensor: onnx.TensorProto, structure: Path) -> Span:
    """Locate elements that were kept as external data. They must be in the one file beside the structure."""
    fields = {entry.key: entry.value for entry in tensor.external_data}
    data = data_file(structure)
    offset, length = fields.get("offset", ""), fields.get("length", "")
    numbers = all(text.isascii() and text.isdecimal() for text in (offset, length))
    if (
        fields.get("location") != data.name
        or not numbers
        or not data.is_file()
        or int(offset) + int(length) > data.stat().st_size
    ):
        raise VerifyError(
            f"tensor {tensor.name} has no elements where they should be, in {data.name}", where=str(structure)
        )
    return data, int(offset), int(length)


# ------------------------------------------------------------------------------------------------ writing


def _write(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray], spans: Sequence[Span], out: Path) -> list[Path]:
    """Fill in arrays, and write the model and its external data. External tensors without a location stay empty."""
    filled = _fill(model, arrays, str(out))
    mark = f"{secrets.token_hex(4)}.tmp"
    data = data_file(out)
    work, data_work = (path.with_name(f".{path.name}.{mark}") for path in (out, data))
    try:
        written = _write_data(model, filled, iter(spans), data_work, data.name)
        with work.open("wb") as file:
            file.write(model.SerializeToString(deterministic=True))
            _flush(file)
        if written:
            # An older model must not stand beside the new data.
            out.unlink(missing_ok=True)
            data_work.replace(data)
        work.replace(out)
    finally:
        work.unlink(missing_ok=True)
        data_work.unlink(missing_ok=True)
    return [out, data] if written else [out]


def _fill(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray], where: str) -> list[Filled]:
    """Store elements in the initializers. Return those that are to become external data."""
    tensors = {label: tensor for label, tensor in _labelled(model).items() if label in arrays}
    strange = [name for name in arrays if name not in tensors or tuple(tensors[name].dims) != arrays[name].shape]
    if strange:
        raise VerifyError(f"the model has no initializers of these names and shapes: {', '.join(strange)}", where=where)
    sizes = {name: int(arrays[name].size) * _dtype(tensor).itemsize for name, tensor in tensors.items()}
    inline = {name for name, tensor in tensors.items() if tensor.data_location != onnx.TensorProto.EXTERNAL}
    if model.ByteSize() + sum(sizes[name] for name in inline) > LARGEST_MESSAGE:
        for name in [name for name in inline if sizes[name] >= _SMALL]:
            tensors[name].data_location = onnx.TensorProto.EXTERNAL
            inline.remove(name)
    for name in inline:
        tensors[name].raw_data = _elements(arrays[name], tensors[name]).tobytes()
    return [(tensor, arrays[name]) for name, tensor in tensors.items() if name not in inline]


def _write_data(
    model: onnx.ModelProto, filled: Sequence[Filled], spans: Iterator[Span], path: Path, location: str
) -> bool:
    """Write the elements of all external tensors, and each one's location into its tensor.

    Return whether there are any.
    """
    # By the tensor object: protobuf returns the same one again as long as `filled` holds it.
    elements = {id(tensor): array for tensor, array in filled}
    todo = [tensor for tensor in _external(model) if tensor.external_data or id(tensor) in elements]
    if not todo:
        return False
    with path.open("wb") as file:
        for tensor in todo:
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            offset = file.tell()
            for piece in (
                _copied(next(spans)) if tensor.external_data else _pieces(_elements(elements[id(tensor)], tensor))
            ):
                file.write(piece)
            entries = {"location": location, "offset": str(offset), "length": str(file.tell() - offset)}
            del tensor.external_data[:]
            tensor.external_data.extend(
                onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items()
            )
        _flush(file)
    return True


def _elements(array: np.ndarray, tensor: onnx.TensorProto) -> np.ndarray:
    """Convert an array to the element type of the initializer.

    Training keeps 32 bits of numbers that have 16 in the file.
    """
    return np.ascontiguousarray(array.astype(_dtype(tensor), copy=False))


def _dtype(tensor: onnx.TensorProto) -> np.dtype:
    return np.dtype(tensor_dtype_to_np_dtype(tensor.data_type))


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


def _copied(span: Span) -> Iterator[bytes]:
    path, offset, left = span
    with path.open("rb") as file:
        file.seek(offset)
        while left:
            piece = file.read(min(left, _CHUNK))
            if not piece:
                raise UsageError(f"has become shorter, {left} bytes are missing", where=str(path))
            left -= len(piece)
            yield piece


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
