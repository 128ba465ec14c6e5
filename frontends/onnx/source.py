"""The ONNX file that is imported: read by its path, checked, its external data kept inside its folder, its tensors as
arrays.

In: a path. Out: the model with its nodes in order, a type for each tensor, arrays, and a hash of everything that was
read. Arrays are not copied where the format allows it; external data is memory-mapped. A UsageError refuses a file that
is missing, truncated or not a valid model. It also refuses external data that is missing, too short, or outside the
model's folder (absolute paths, `..`, links that lead out of it). A memory-mapped array is read-only and must not
outlive the file.

Known limit: onnx's checker is native code, so a file made to crash it would end the process. None is known.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar, cast

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from penstock.frontends.order import NeedCircle, order_by_need
from penstock.ir.graph import Namer
from penstock.ir.types import FLOATS, TensorType, dtype_of
from penstock.support.errors import UsageError
from penstock.support.out_of_memory import is_out_of_memory

# Shape inference only reads the elements of small tensors (shapes, axes). Of larger ones it gets the type alone.
SMALL = 1024
# GroupNormalization before opset 21, LayerNormalization before 17, and an operator of onnxruntime in the default
# domain.
_UNREGISTERED = ("GroupNormalization", "LayerNormalization", "SimplifiedLayerNormalization")
_OTHER_OPSET, _NO_SHAPE = "whereas model imports version", "Field 'shape' of 'type' is required"
_NO_OPSET = "No opset import for domain ''"
_TOLERATED = (_NO_OPSET, _NO_SHAPE, *(f"registered for {kind}" for kind in _UNREGISTERED), _OTHER_OPSET)
# The most elements of a sparse tensor, zeros included.
MOST_DENSE = 1 << 26
# Tensors of more bytes are shared by copies of a file.
_LARGE = 1 << 12

_Nodes = MutableSequence[onnx.NodeProto]
T = TypeVar("T")


def element_name(elem_type: int) -> str:
    """Return ONNX's name for an element type, for messages."""
    known = onnx.TensorProto.DataType.items()
    return next((name.lower() for name, number in known if number == elem_type), str(elem_type))


def our_dtype(elem_type: int) -> str:
    """Return our name for an ONNX element type. Raise ValueError if there is none."""
    try:
        return dtype_of(tensor_dtype_to_np_dtype(elem_type))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"element type {element_name(elem_type)} has no counterpart here") from error


class OnnxFile:
    """A model file and its external data. `moved` says how many of its nodes were put in order."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.model = _parse(self.path)
        self.moved = put_in_order(self.model, str(self.path))
        self._folder = self.path.parent.resolve()
        self._files: dict[str, Path] = {}
        # Findings about the file, elements that copies of it lack, and what is made of them: copies share all.
        self._told: dict[str, str] = {}
        self._elements: dict[str, np.ndarray] = {}
        self._made: dict[object, object] = {}
        self._stored = frozenset(tensor.name for tensor in self.model.graph.initializer)
        for tensor in _tensors(self.model.graph):
            if min(tensor.dims, default=0) < 0:
                raise UsageError(f"tensor {tensor.name} has a negative size: {list(tensor.dims)}", where=str(self.path))
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                self._span(tensor)

    def copy(self) -> OnnxFile:
        """Return the file as it is now, for another import of it. The elements of large tensors are shared."""
        other: OnnxFile = object.__new__(OnnxFile)
        other.__dict__.update(self.__dict__)
        other.model = onnx.ModelProto()
        large = [t for t in self.model.graph.initializer if len(t.raw_data) > _LARGE]
        self._elements.update((t.name, self.array(t)) for t in large)
        other.model.CopyFrom(self.model)
        for tensor in other.model.graph.initializer:
            if tensor.name in self._elements:
                tensor.ClearField("raw_data")
        return other

    def part(
        self,
        nodes: Iterable[onnx.NodeProto],
        inputs: Iterable[onnx.ValueInfoProto],
        outputs: Iterable[onnx.ValueInfoProto],
        tensors: Mapping[str, np.ndarray],
    ) -> OnnxFile:
        """Return a file with these nodes, inputs and outputs, the initializers that they take, and new ones.

        The elements of large tensors are shared.
        """
        other: OnnxFile = object.__new__(OnnxFile)
        other.__dict__.update(self.__dict__)
        model = other.model = onnx.ModelProto()
        model.ir_version, model.producer_name = self.model.ir_version, self.model.producer_name
        model.opset_import.extend(self.model.opset_import)
        model.functions.extend(self.model.functions)
        graph = model.graph
        graph.node.extend(nodes)
        graph.input.extend(inputs)
        graph.output.extend(outputs)
        needed = {name for node in graph.node for name in names_taken(node)} | {value.name for value in graph.output}
        for tensor in self.model.graph.initializer:
            if tensor.name in needed:
                graph.initializer.append(self._without_elements(tensor))
        graph.sparse_initializer.extend(t for t in self.model.graph.sparse_initializer if t.values.name in needed)
        graph.value_info.extend(value for value in self.model.graph.value_info if value.metadata_props)
        graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
        return other

    def _without_elements(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Return a tensor whose elements are shared, if they are many."""
        if len(tensor.raw_data) <= _LARGE and tensor.name not in self._elements:
            return tensor
        if tensor.name not in self._elements:
            self._elements[tensor.name] = self.array(tensor)
        return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)

    def stores(self, names: Iterable[str]) -> bool:
        """Return whether all names are those of initializers of the file's own graph."""
        return self._stored.issuperset(names)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` gives, which is made once for the file and its copies."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def check(self) -> str:
        """Return the objection of onnx.checker to the file, "" if it is valid.

        Four more things count as valid because exporters write them: functions of another opset, tensors without a
        shape, operators that the checker does not have or calls deprecated, and an opset of another domain alone.
        """
        if "objection" not in self._told:
            self._told["objection"] = self._checked()
        return self._told["objection"]

    def _checked(self) -> str:
        light = self._light() if self.moved else None
        problem = _complaint(light or str(self.path))
        for about in _TOLERATED:
            if about in problem:
                light = light or self._light()
                _mend(light, about)
                problem = _complaint(light)
        return problem

    def type_of(self, tensor: onnx.TensorProto) -> TensorType:
        """Return the type of a stored tensor. Raise ValueError for an element type that has no counterpart here."""
        return TensorType(our_dtype(tensor.data_type), tuple(tensor.dims))

    def array(self, tensor: onnx.TensorProto) -> np.ndarray:
        """Return the tensor's elements, read-only."""
        if tensor.name in self._elements and not tensor.HasField("raw_data"):
            return self._elements[tensor.name]
        shape = tuple(tensor.dims)
        dtype = self._stored_dtype(tensor)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            file, offset = self._span(tensor)
            if 0 in shape:
                return np.zeros(shape, dtype)
            mapped = np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=shape)
            return np.asarray(mapped) if offset % dtype.itemsize == 0 else np.array(mapped)
        # Types narrower than a byte and the typed fields (float_data, ...) need onnx's own unpacking.
        if not tensor.HasField("raw_data") or element_name(tensor.data_type).endswith(("int4", "e2m1", "int2")):
            try:
                return numpy_helper.to_array(tensor)
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"tensor {tensor.name} of shape {list(shape)} cannot be read: {error}", where=str(self.path)
                ) from error
        raw = tensor.raw_data
        if len(raw) != dtype.itemsize * math.prod(shape):
            raise UsageError(
                f"tensor {tensor.name} of shape {list(shape)} holds {len(raw)} bytes", where=str(self.path)
            )
        return np.frombuffer(raw, dtype).reshape(shape)

    def is_float(self, tensor: onnx.TensorProto) -> bool:
        try:
            return our_dtype(tensor.data_type) in FLOATS
        except ValueError:
            return False

    def dense(self, sparse: onnx.SparseTensorProto) -> np.ndarray:
        """Return all elements of a sparse tensor.

        The values are at indices that are row-major positions or one index per dimension. All other elements are zero.
        """
        dims, values, indices = tuple(sparse.dims), self.array(sparse.values).reshape(-1), self.array(sparse.indices)
        size = int(np.prod(dims, dtype=np.int64))
        if size > MOST_DENSE:
            raise UsageError(
                f"sparse tensor {sparse.values.name} of shape {list(dims)} is too large", where=str(self.path)
            )
        flat = np.zeros(size, values.dtype)
        try:
            flat[np.ravel_multi_index(tuple(indices.T), dims) if indices.ndim == 2 else indices] = values
        except (IndexError, ValueError) as error:
            raise UsageError(f"sparse tensor {sparse.values.name}: {error}", where=str(self.path)) from error
        return flat.reshape(dims)

    def digest(self) -> str:
        """Compute the sha256 of the model file, then of the name and content of each external file."""
        if "digest" in self._told:
            return self._told["digest"]
        total = hashlib.sha256(_hash_file(self.path))
        for location in sorted(self._files):
            total.update(location.encode() + b"\0" + _hash_file(self._files[location]))
        self._told["digest"] = total.hexdigest()
        return self._told["digest"]

    def _light(self) -> onnx.ModelProto:
        """Copy the model with its large tensors as inputs."""
        light = onnx.ModelProto()
        light.ir_version = self.model.ir_version
        light.opset_import.extend(self.model.opset_import)
        light.functions.extend(self.model.functions)
        graph, target = self.model.graph, light.graph
        target.name = "light"
        target.node.extend(graph.node)
        target.output.extend(graph.output)
        target.sparse_initializer.extend(graph.sparse_initializer)
        for tensor in graph.initializer:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            if external or math.prod(tensor.dims) > SMALL:
                target.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tuple(tensor.dims))
                )
            else:
                target.initializer.append(tensor)
        stored = {t.name for t in graph.initializer}
        target.input.extend(value for value in graph.input if value.name not in stored)
        return light

    def _stored_dtype(self, tensor: onnx.TensorProto) -> np.dtype:
        try:
            return np.dtype(tensor_dtype_to_np_dtype(tensor.data_type))
        except KeyError as error:
            raise UsageError(
                f"tensor {tensor.name} has an element type that does not exist", where=str(self.path)
            ) from error

    def _span(self, tensor: onnx.TensorProto) -> tuple[Path, int]:
        """Return file and offset of external data, after every check."""
        fields = {entry.key: entry.value for entry in tensor.external_data}
        location = fields.get("location", "")
        where = f"{self.path}: tensor {tensor.name}"
        file = self._contained(location, where)
        needed = math.prod(tensor.dims) * self._stored_dtype(tensor).itemsize
        try:
            offset, length = int(fields.get("offset", "0")), int(fields.get("length", str(needed)))
        except ValueError as error:
            raise UsageError("offset and length of external data must be numbers", where=where) from error
        if offset < 0 or length != needed:
            raise UsageError(f"needs {needed} bytes, the file names {length} bytes at offset {offset}", where=where)
        size = file.stat().st_size
        if offset + needed > size:
            raise UsageError(
                f"needs bytes {offset} to {offset + needed} of {location}, which has only {size}", where=where
            )
        return file, offset

    def external(self, tensor: onnx.TensorProto) -> tuple[Path, int, int]:
        """Return file, offset and number of bytes of a tensor that is external data."""
        file, offset = self._span(tensor)
        return file, offset, math.prod(tensor.dims) * self._stored_dtype(tensor).itemsize

    def _contained(self, location: str, where: str) -> Path:
        if location in self._files:
            return self._files[location]
        hint = "external data must lie in the model's folder or below it"
        paths = (PurePosixPath(location), PureWindowsPath(location))
        if not location or any(p.is_absolute() or p.drive or p.root or ".." in p.parts for p in paths):
            raise UsageError(f"external data at {location!r} is refused", where=where, hint=hint)
        try:
            file = (self._folder / location).resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"external data file {location!r} is not there", where=where, hint=hint) from error
        if not file.is_relative_to(self._folder):
            raise UsageError(f"external data at {location!r} leads out of the model's folder", where=where, hint=hint)
        if not file.is_file():
            raise UsageError(f"external data at {location!r} is not a regular file", where=where, hint=hint)
        self._files[location] = file
        return file


def _complaint(model: str | onnx.ModelProto) -> str:
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the checker raises ValidationError, ValueError and RuntimeError alike
        return str(error).strip()
    return ""


def _mend(model: onnx.ModelProto, about: str) -> None:
    """Remove the cause of an objection from a copy, so that the checker goes on to the next."""
    if about == _OTHER_OPSET:  # each function is read in its own opset
        del model.functions[:]
    elif about == _NO_OPSET:
        model.opset_import.append(onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version()))
    elif about == _NO_SHAPE:
        for graph in all_graphs(model.graph):
            for value in (*graph.input, *graph.output, *graph.value_info):
                if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                    value.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
    else:
        if all(entry.domain != "unregistered" for entry in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid("unregistered", 1))
        for node in model.graph.node:
            if node.op_type in _UNREGISTERED:
                node.domain = "unregistered"


def _parse(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise UsageError(
            "no such file" if not path.exists() else "not a file",
            where=str(path),
            hint="give the path of an ONNX model",
        )
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except DecodeError as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"not a readable ONNX file: {error}", where=str(path), hint="is it truncated?") from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    if not all(isinstance(text, str) for text in _texts(model)):  # protobuf returns bytes where text is not UTF-8
        raise UsageError("holds names that are not UTF-8", where=str(path), hint="is it damaged?")
    return model


def _texts(model: onnx.ModelProto) -> Iterator[object]:
    """Yield all names of a model that the importer reads."""
    graph = model.graph
    for entry in model.opset_import:
        yield entry.domain
    for value in (*graph.input, *graph.output, *graph.initializer):
        yield value.name
    for value in (*graph.input, *graph.output):
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for tensor in _tensors(graph):
        yield from (field for entry in tensor.external_data for field in (entry.key, entry.value))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield all stored tensors: initializers and those in attributes of nodes, subgraphs included."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in graphs_of(attribute):
                yield from _tensors(inner)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and those inside its nodes."""
    return (inner for _, inner in _placed(graph, ""))


def _placed(graph: onnx.GraphProto, path: str) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Yield a graph and those inside its nodes, each with the path of nodes and parts to it."""
    yield path, graph
    for index, node in enumerate(graph.node):
        for attribute in node.attribute:
            at = f"{path}{node_name(node, index)}/{attribute.name.removesuffix('_branch')}/"
            for inner in graphs_of(attribute):
                yield from _placed(inner, at)


def node_name(node: onnx.NodeProto, index: int) -> str:
    """Return the name of a node, or one made from its `index` in its graph."""
    return node.name or f"{node.op_type}_{index}"


Label = tuple[str, onnx.GraphProto, onnx.TensorProto]


def stored_in(graph: onnx.GraphProto) -> list[Label]:
    """List the initializers of a graph and of those inside its nodes, each with its graph and a unique label.

    The label is the initializer's name in the graph itself, and in inner graphs if no other tensor of these has that
    name. Otherwise the place comes before the name: `If_4/then/w`. Elements are not read.
    """
    initializers = [(path, inner, tensor) for path, inner in _placed(graph, "") for tensor in inner.initializer]
    others = (
        [v.name for v in graph.input]
        + [t.values.name for t in graph.sparse_initializer]
        + [o for node in graph.node for o in node.output]
    )
    times = Counter([*others, *(tensor.name for _, _, tensor in initializers)])
    namer = Namer(times)

    def label(path: str, tensor: onnx.TensorProto) -> str:
        return tensor.name if not path or times[tensor.name] == 1 else namer.fresh(f"{path}{tensor.name}")

    return [(label(path, tensor), inner, tensor) for path, inner, tensor in initializers]


# ---------------------------------------------------------------------------------------- the order of nodes


def put_in_order(model: onnx.ModelProto, where: str) -> int:
    """Put each node behind those whose results it takes. Return how many nodes lay before one of these.

    A node without a name whose graph is ordered anew is called by its place in the file.
    """
    moved = sum(_order_nodes(function.node, f"{function.name}/", where) for function in model.functions)
    return moved + _order_nodes(model.graph.node, "", where)


def _order_nodes(nodes: _Nodes, path: str, where: str) -> int:
    """Order nodes, and those inside them. `path` leads to their graph."""
    moved = 0
    for index, node in enumerate(nodes):
        for attribute in node.attribute:
            for inner in graphs_of(attribute):
                moved += _order_nodes(inner.node, f"{path}{node_name(node, index)}/", where)
    needs = [names_taken(node) for node in nodes]
    try:
        order = order_by_need(needs, [[name for name in node.output if name] for node in nodes])
    except NeedCircle as circle:
        names = [f"{path}{node_name(nodes[i], i)} ({nodes[i].op_type})" for i in circle.numbers]
        shown = names if len(names) <= 8 else [*names[:8], f"{len(names) - 8} more"]
        raise UsageError(
            f"not a valid ONNX model: nodes need each other's results in a circle: {', '.join(shown)}", where=where
        ) from circle
    if order == list(range(len(nodes))):
        return moved
    makers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.output:
            makers.setdefault(name, index)
    moved += sum(any(makers.get(name, -1) > i for name in names) for i, names in enumerate(needs))
    kept = []
    for number in order:
        copy = onnx.NodeProto()
        copy.CopyFrom(nodes[number])
        copy.name = node_name(copy, number)
        kept.append(copy)
    del nodes[:]
    nodes.extend(kept)
    return moved


def names_taken(node: onnx.NodeProto) -> dict[str, None]:
    """List the names that a node takes, its graphs included, in order."""
    names = dict.fromkeys(filter(None, node.input))
    for attribute in node.attribute:
        for graph in graphs_of(attribute):
            names.update(dict.fromkeys(_taken(graph)))
    return names


def _taken(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names that a graph takes from around it."""
    inside = {value.name for value in (*graph.input, *graph.initializer)}
    inside.update(sparse.values.name for sparse in graph.sparse_initializer)
    inside.update(name for node in graph.node for name in node.output)
    for names in (*map(names_taken, graph.node), [value.name for value in graph.output]):
        yield from (name for name in names if name not in inside)


def graphs_of(attribute: onnx.AttributeProto) -> tuple[onnx.GraphProto, ...]:
    """List the graphs that an attribute holds."""
    return (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs)


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
