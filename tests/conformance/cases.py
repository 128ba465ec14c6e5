"""The node tests of onnx.backend.test, and which of them count.

ALL are the node tests that the onnx package makes. NUMERIC are those that take and give tensors of numbers and are determined: `excluded`
says in words why another one is not among them. PLAIN are the numeric ones that are not the expansion of an operator into the body that
its schema gives: expansions test the same few operators again and again. COUNTS are what there is in the release of onnx named by ONNX.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

ONNX = "1.23.2"
ALL, NUMERIC, PLAIN = "all", "numeric", "plain"
COUNTS = {ALL: 1884, NUMERIC: 1631, PLAIN: 1208}

_NARROW = ("FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2")
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


@dataclass(frozen=True)
class Case:
    """One test. `inputs` and `outputs` are in the order of the graph's; those of sequences and optionals are not tensors."""

    name: str
    model: onnx.ModelProto
    inputs: tuple[object, ...]
    outputs: tuple[object, ...]
    rtol: float
    atol: float

    def compare(self, found: list[np.ndarray]) -> None:
        """AssertionError where `found` are not the expected outputs, by onnx's own comparison: shapes, element types, values."""
        Runner.assert_similar_outputs([plain(x) for x in self.outputs], found, self.rtol, self.atol)


def plain(data: object) -> np.ndarray:
    """Test data as an array: onnx gives arrays, NumPy's scalars, and tensors as they are stored."""
    return onnx.numpy_helper.to_array(data) if isinstance(data, onnx.TensorProto) else np.asarray(data)


@lru_cache(maxsize=1)
def collect() -> tuple[Case, ...]:
    """All node tests, in onnx's order. Takes a few seconds; onnx seeds its random numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = load_model_tests(kind="node")
    cases = []
    for test in given:
        ((inputs, outputs),) = test.data_sets
        cases.append(Case(test.name, test.model, tuple(inputs), tuple(outputs), test.rtol, test.atol))
    return tuple(cases)


def members(case: Case) -> tuple[str, ...]:
    """The sets that a case is in."""
    if excluded(case):
        return (ALL,)
    return (ALL, NUMERIC) if "_expanded" in case.name else (ALL, NUMERIC, PLAIN)


def excluded(case: Case) -> str:
    """Why a case is not numeric; empty when it is."""
    graph = case.model.graph
    if any(not value.type.HasField("tensor_type") for value in (*graph.input, *graph.output)):
        return "takes or gives a sequence, an optional or a map"
    kinds = {name for number in _element_types(graph) for name, n in onnx.TensorProto.DataType.items() if n == number}
    if "STRING" in kinds:
        return "has strings"
    if any(kind.startswith(_NARROW) for kind in kinds):
        return "has numbers of 8 bits in floating point, or of 4 or 2 bits"
    nodes = [node for g in graphs_of(graph) for node in g.node]
    foreign = sorted({node.domain for node in nodes} - {"", "ai.onnx"})
    if foreign:
        return f"is of domain {', '.join(foreign)}"
    if any(node.op_type in _RANDOM for node in nodes) or case.name.startswith("test_training_"):
        return "draws random numbers"
    return ""


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all inside it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from graphs_of(inner)


def _element_types(graph: onnx.GraphProto) -> set[int]:
    found: set[int] = set()
    for inner in graphs_of(graph):
        for value in (*inner.input, *inner.output, *inner.value_info):
            kind = value.type
            while not kind.HasField("tensor_type"):
                if kind.HasField("sequence_type"):
                    kind = kind.sequence_type.elem_type
                elif kind.HasField("optional_type"):
                    kind = kind.optional_type.elem_type
                else:
                    break
            found.add(kind.tensor_type.elem_type)
        found.update(tensor.data_type for tensor in inner.initializer)
    return found
