"""The parts that several frontends share: joining and cutting of tensors, patterns of names, and the error of an import."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.frontends.formulas.layout import concat, cut_negative, entry, stack
from penstock.frontends.imported import Unimported, refusal
from penstock.frontends.names import Names, pattern_of
from penstock.frontends.writer import GraphWriter, Refused, Writer
from penstock.ir.graph import Value
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def run(write: Callable[[Writer, Value], Value]) -> tuple[np.ndarray, list[str]]:
    """Write a formula of the one input X, and run it. Return the result and the kinds of its operations."""
    program = GraphWriter(Names(["x", "y"]))
    x = Value("x", TensorType("f32", X.shape))
    y = write(Writer(program, "node"), x)
    main = program.module("shared", [x], [("y", y)]).graphs["main"]
    (result,) = run_graph(main, {"x": X})
    return np.asarray(result), [op.kind for op in main.ops]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_an_entry_is_taken_without_its_dimension(axis: int, at: int) -> None:
    result, _ = run(lambda w, x: entry(w, x, axis, at))
    np.testing.assert_array_equal(result, np.take(X, at, axis))


@pytest.mark.parametrize("at", [3, -4])
def test_an_entry_outside_is_refused(at: int) -> None:
    with pytest.raises(Refused, match=rf"^index {at} is outside dimension 1 of f32\[2,3,4\]$"):
        run(lambda w, x: entry(w, x, 1, at))


def test_negative_padding_cuts_and_the_rest_is_returned() -> None:
    padding: list[list[int]] = []

    def write(w: Writer, x: Value) -> Value:
        y, *padding[:] = cut_negative(w, x, [0, -1, 2], [-1, 0, -3])
        return y

    result, _ = run(write)
    np.testing.assert_array_equal(result, X[:1, 1:, :1])
    assert padding == [[0, 0, 2], [0, 0, 0]]


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_tensors_are_stacked_along_a_new_axis(axis: int, count: int) -> None:
    result, _ = run(lambda w, x: stack(w, [x] * count, axis))
    np.testing.assert_array_equal(result, np.stack([X] * count, axis))


def test_one_tensor_is_joined_without_an_operation() -> None:
    _, kinds = run(lambda w, x: w.emit("neg", concat(w, [x], 0)))
    assert kinds == ["neg"]
    result, kinds = run(lambda w, x: concat(w, [x, x], 2))
    np.testing.assert_array_equal(result, np.concatenate([X, X], 2))
    assert kinds == ["concat"]


def test_a_pattern_is_compiled_or_is_an_error_that_names_its_flag() -> None:
    pattern = pattern_of("w.*", "frozen", "here")
    assert pattern is not None
    assert pattern.search("a.weight")
    assert pattern_of(None, "frozen", "here") is None
    assert pattern_of("", "frozen", "here") is None
    with pytest.raises(UsageError, match=r"--trained '\(' is not a regular expression"):
        pattern_of("(", "--trained", "here")


def test_an_error_counts_the_places() -> None:
    assert refusal(["a: no"]) == "the model cannot be imported, one place:\n  a: no"
    assert refusal(["a: no", "b: no"]) == "the model cannot be imported, 2 places:\n  a: no\n  b: no"


def test_nodes_of_one_operator_and_reason_are_one_row() -> None:
    loops = [Unimported(f"L{i}", "ai.onnx Loop", "no number") for i in range(19)]
    others = [
        Unimported("a", "Det", "no rule"),
        "input x: no",
        Unimported("b", "Det", "no"),
        Unimported("c", "Det", "no rule", " at m.py:3"),
    ]
    assert refusal([others[0], *loops, *others[1:]]).splitlines() == [
        "the model cannot be imported, 23 places:",
        "  Det: 2 nodes (a, c at m.py:3): no rule",
        "  ai.onnx Loop: 19 nodes (L0, L1, L2, ...): no number",
        "  input x: no",
        "  b (Det): no",
    ]
