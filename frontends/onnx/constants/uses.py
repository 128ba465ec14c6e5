"""Uses of the stored tensors of a graph: the nodes that read them, and what becomes of the results.

    uses_in   a model -> a function that lists the readers of an initializer

In: the nodes as the file has them. A tensor keeps its identity through nodes that only show it in another form
(VIEWS), into bodies of control flow, and into local functions. Every node that reads it in any of these forms is a
reader. Equal readers count once. Nothing is computed, and no elements are read.

Known limit: what a loop, a scan or a branch takes as an operand is followed no further. The node itself is the reader.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import onnx

# Operators whose result has the elements of their first operand, in another shape, order or type.
VIEWS = frozenset({"Identity", "Cast", "CastLike", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Flatten", "Expand"})
# The kind of a reader that is no node: the tensor is a result of its graph.
RESULT = "result"
_STANDARD = ("", "ai.onnx")
# Functions inside each other are followed so deep. The importer refuses deeper ones.
_DEEPEST = 64


@dataclass(frozen=True)
class Reader:
    """One way in which nodes read a tensor.

    kind        the operator, with its domain before it where that is not ONNX's own
    position    the place of the operand
    then        the operators that read the result, each with the place, as `Div 1`
    channels    the output channels of the product or convolution that made the other operand, if that is known
    """

    kind: str
    position: int
    then: frozenset[str] = frozenset()
    channels: int | None = None


Readers = dict[Reader, None]
# What a name stands for in a graph: an initializer by its object, or a parameter of a function by its number.
_Origin = tuple[str, int]
_Key = tuple[str, str, str]
# Names that stand for an initializer; None hides one of a graph around.
_Names = ChainMap[str, _Origin | None]


@dataclass
class _Walk:
    """The readers that were met, and the functions of the model. `dims` are the shapes of initializers."""

    functions: Mapping[_Key, onnx.FunctionProto]
    readers: dict[_Origin, Readers] = field(default_factory=dict)
    dims: dict[_Origin, tuple[int, ...]] = field(default_factory=dict)
    inside: dict[_Key, list[Readers]] = field(default_factory=dict)
    # They keep the objects alive by whose identity initializers are known: protobuf returns the same ones again then.
    tensors: list[onnx.TensorProto] = field(default_factory=list)


def uses_in(model: onnx.ModelProto) -> Callable[[onnx.TensorProto], tuple[Reader, ...]]:
    """Read the nodes of a model. Return a function from an initializer to its readers."""
    walk = _Walk({(f.domain, f.name, f.overload): f for f in model.functions})
    _graph(walk, model.graph, ChainMap(), 0)

    def readers(tensor: onnx.TensorProto) -> tuple[Reader, ...]:
        return tuple(walk.readers.get(("stored", id(tensor)), ()))

    return readers


def _graph(walk: _Walk, graph: onnx.GraphProto, around: _Names, depth: int) -> None:
    here: dict[str, _Origin | None] = dict.fromkeys((value.name for value in graph.input), None)
    for tensor in graph.initializer:
        walk.tensors.append(tensor)
        here[tensor.name] = origin = ("stored", id(tensor))
        walk.dims[origin] = tuple(tensor.dims)
    _nodes(walk, graph.node, ChainMap(here, *around.maps), [value.name for value in graph.output], depth)


def _nodes(walk: _Walk, nodes: Iterable[onnx.NodeProto], names: _Names, results: Iterable[str], depth: int) -> None:
    """Add the readers among nodes that stand in order. `names` changes: a node's result hides what had its name."""
    nodes = list(nodes)
    makers = {name: node for node in nodes for name in node.output if name}
    after: dict[str, set[str]] = {}
    for node in nodes:
        for position, name in enumerate(node.input):
            after.setdefault(name, set()).add(f"{kind_of(node)} {position}")
    for node in nodes:
        then = frozenset(after.get(node.output[0], ())) if node.output else frozenset()
        whole = kind_of(node) in VIEWS
        inner = _readers_inside(walk, node, depth)
        for position, name in enumerate(node.input):
            origin = names.get(name)
            if origin is None or (whole and position == 0):
                continue
            mine = walk.readers.setdefault(origin, {})
            if inner is not None:
                mine.update(inner[position] if position < len(inner) else {})
            else:
                channels = _channels(walk, node, position, makers, names)
                mine[Reader(kind_of(node), position, then, channels)] = None
        for attribute in node.attribute:
            for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                if depth < _DEEPEST:
                    _graph(walk, graph, names, depth + 1)
        viewed = names.get(node.input[0]) if whole and node.input else None
        for name in node.output:
            names[name] = None
        if node.output:
            names[node.output[0]] = viewed
    for name in results:
        if (origin := names.get(name)) is not None:
            walk.readers.setdefault(origin, {})[Reader(RESULT, 0)] = None


def _readers_inside(walk: _Walk, node: onnx.NodeProto, depth: int) -> list[Readers] | None:
    """List the readers of each parameter of the function that a node calls, or return None if it calls none."""
    key = (node.domain, node.op_type, node.overload)
    function = walk.functions.get(key)
    if function is None or depth >= _DEEPEST:
        return None
    if key not in walk.inside:
        walk.inside[key] = []  # a function that calls itself, which the importer refuses, ends here
        body = _Walk(walk.functions, inside=walk.inside, tensors=walk.tensors)
        parameters: dict[str, _Origin | None] = {name: ("parameter", i) for i, name in enumerate(function.input)}
        _nodes(body, function.node, ChainMap(parameters), function.output, depth + 1)
        walk.readers.update({origin: readers for origin, readers in body.readers.items() if origin[0] == "stored"})
        walk.inside[key] = [body.readers.get(("parameter", i), {}) for i in range(len(function.input))]
    return walk.inside[key]


def kind_of(node: onnx.NodeProto) -> str:
    """Name the operator of a node, with its domain before it where that is not ONNX's own."""
    return node.op_type if node.domain in _STANDARD else f"{node.domain}.{node.op_type}"


def _channels(
    walk: _Walk,
    node: onnx.NodeProto,
    position: int,
    makers: Mapping[str, onnx.NodeProto],
    names: _Names,
) -> int | None:
    """Return the channels of the other operand of a sum, if a product with a stored weight or a convolution made it."""
    if kind_of(node) != "Add" or len(node.input) != 2:
        return None
    maker = makers.get(node.input[1 - position])
    if maker is None or len(maker.input) < 2:
        return None
    dims = walk.dims.get(names.get(maker.input[1]) or ("", 0))
    viewed = maker.input[1] in makers
    match kind_of(maker), dims:
        case _, None | ():
            return None
        case _, sizes if viewed and kind_of(maker) in ("MatMul", "Gemm", "Conv"):  # turned: which axis is not known
            return min(sizes)
        case ("MatMul", sizes):
            return sizes[-1]
        case ("Conv", sizes):
            return sizes[0]
        case ("Gemm", (rows, columns)):
            turned = any(a.name == "transB" and a.i for a in maker.attribute)
            return rows if turned else columns
        case ("ConvTranspose", sizes) if len(sizes) > 1:
            groups = next((a.i for a in maker.attribute if a.name == "group"), 1)
            return sizes[1] * groups
    return None
