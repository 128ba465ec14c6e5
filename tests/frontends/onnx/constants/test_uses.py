"""Readers of initializers: through views, branches and functions, with names that hide others."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from penstock.frontends.onnx.constants.uses import Reader, uses_in

HEAD = '<ir_version: 10, opset_import: ["" : 20, "mine" : 1]>'


def readers(text: str, name: str = "w") -> set[tuple[str, int]]:
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    found = uses_in(model)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    return {(reader.kind, reader.position) for reader in found(tensor)}


CASES = {
    "direct": ("g (float[2] x) => (float[2] y) <float[2] w> { y = Mul(x, w) }", {("Mul", 1)}),
    "twice": ("g (float[2] x) => (float[2] y) <float[2] w> { a = Mul(w, w) y = Sub(a, x) }", {("Mul", 0), ("Mul", 1)}),
    "views": (
        "g (float[2] x) => (float[2] y) <float[2] w, int64[1] s> { a = Identity(w) b = Reshape(a, s) c = Cast<to = 1>(b) y = Max(x, c) }",
        {("Max", 1)},
    ),
    "shape of a view": ("g (float[2] x) => (float[2] y) <float[2] w, int64[1] s> { y = Reshape(x, s) }", set()),
    "result": ("g (float[2] x) => (float[2] y, float[2] z) <float[2] w> { y = Neg(x) z = Identity(w) }", {("result", 0)}),
    "domain": ("g (float[2] x) => (float[2] y) <float[2] w> { y = other.Max(x, w) }", {("other.Max", 1)}),
    "branches": (
        """g (bool c, float[2] x) => (float[2] y) <float[2] w> { y = If(c)<
           then_branch = a () => (float[2] t) { t = Max(x, w) }, else_branch = b () => (float[2] e) { e = Min(w, x) }> }""",
        {("Max", 1), ("Min", 0)},
    ),
    "hidden by a result": (
        """g (bool c, float[2] x) => (float[2] y) <float[2] w> { z = Add(x, w) y = If(c)<
           then_branch = a () => (float[2] t) { w = Neg(x) t = Max(x, w) }, else_branch = b () => (float[2] e) { e = Identity(x) }> }""",
        {("Add", 1)},
    ),
    "function": (
        "g (float[2] x) => (float[2] y) <float[2] w> { y = mine.f(x, w) } <domain: \"mine\", opset_import: [\"\" : 20]> f (a, b) => (c) { d = Identity(b) c = Max(d, a) }",
        {("Max", 0)},
    ),
    "function in a function": (
        """g (float[2] x) => (float[2] y) <float[2] w> { y = mine.g(w, x) }
           <domain: "mine", opset_import: ["" : 20]> f (a, b) => (c) { c = Sub(b, a) }
           <domain: "mine", opset_import: ["" : 20, "mine" : 1]> g (a, b) => (c) { d = mine.f(b, a) c = Mul(a, d) }""",
        {("Sub", 0), ("Mul", 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_readers(case: str) -> None:
    text, expected = CASES[case]
    text = text.replace("float[2] w", "float[2] w = {1, 2}").replace("int64[1] s", "int64[1] s = {2}")
    assert readers(text) == expected


def test_what_becomes_of_a_result() -> None:
    text = "g (float[2] x) => (float[2] y) <float[1] w = {1}> { a = Add(x, w) b = Sqrt(a) y = Div(x, a) }"
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    (reader,) = uses_in(model)(model.graph.initializer[0])
    assert reader == Reader("Add", 1, frozenset({"Sqrt 0", "Div 1"}))


CHANNELS = {
    "a = MatMul(x, v) y = Add(a, w)": 5,
    "a = MatMul(x, v) y = Add(w, a)": 5,
    "a = Gemm(x, v) y = Add(a, w)": 5,
    "a = Gemm<transB = 1>(x, v) y = Add(a, w)": 3,
    "a = Conv(x, v) y = Add(a, w)": 3,
    "a = ConvTranspose<group = 2>(x, v) y = Add(a, w)": 10,
    "t = Transpose(v) a = MatMul(x, t) y = Add(a, w)": 3,
    "a = MatMul(x, v) y = Sub(a, w)": None,
    "a = MatMul(x, x) y = Add(a, w)": None,
    "y = Add(x, w)": None,
}


@pytest.mark.parametrize("body", CHANNELS)
def test_channels_of_what_a_bias_is_added_to(body: str) -> None:
    text = f"g (float[3,3] x) => (float[3,5] y) <float[1] w = {{1}}> {{ {body} }}"
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    model.graph.initializer.append(helper.make_tensor("v", TensorProto.FLOAT, (3, 5), [0.0] * 15))
    (reader,) = uses_in(model)(model.graph.initializer[0])
    assert reader.channels == CHANNELS[body]


def test_functions_that_call_each_other_end() -> None:
    """The importer refuses them; reading their uses must end. Without memory of functions this one would take 2**60 walks."""
    functions = [
        helper.make_function(
            "mine", f"f{i}", ["a"], ["c"],
            [helper.make_node(f"f{i + 1}", ["a"], ["b"], domain="mine"), helper.make_node(f"f{i + 1}", ["b"], ["c"], domain="mine")],
            [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)],
        )
        for i in range(60)
    ]  # fmt: skip
    loop = helper.make_node("f0", ["a"], ["c"], domain="mine")
    functions.append(helper.make_function("mine", "f60", ["a"], ["c"], [loop], [helper.make_opsetid("mine", 1)]))
    graph = helper.make_graph(
        [helper.make_node("f0", ["w"], ["y"], domain="mine")],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [helper.make_tensor("w", TensorProto.FLOAT, (2,), [1.0, 2.0])],
    )
    model = helper.make_model(graph, functions=functions)
    assert uses_in(model)(model.graph.initializer[0]) == ()
