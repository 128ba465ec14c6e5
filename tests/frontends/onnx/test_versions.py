"""Operators in the forms that older opsets gave them, against onnxruntime; versions that are not read; inputs bound to values; functions."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from penstock.frontends.onnx import CannotImport, import_onnx
from penstock.support.errors import UnsupportedModel, UsageError

from .cases import draw, judge, run, write_model

# opset | inputs => outputs | nodes, as in rules/test_rules.py.
CASES = """
7 | float[2,3] x, float[3] w => float[] y | y = Add(x, w)
7 | float[2,3] x => float[] y | y = Clip<min = -0.5, max = 0.5>(x)
7 | float[2,3] x => float[] y | y = Clip<max = 0.5>(x)
7 | float[2,3] x => float[] y | y = Dropout<ratio = 0.3>(x)
7 | float[2,3,4] x => float[] y | y = Softmax(x)
7 | float[2,3,4] x => float[] y | y = Softmax<axis = 2>(x)
11 | float[2,3,4] x => float[] y | y = Softmax<axis = -2>(x)
12 | float[2,3,4] x => float[] y | y = LogSoftmax<axis = 0>(x)
7 | float[2,3,4] x => float[] y | y = Pad<pads = [0,1,2,0,0,1], value = 1.5>(x)
9 | float[3,4] x => float[] y | y = Pad<mode = "reflect", pads = [1,2,0,1]>(x)
7 | float[5,6] x => float[] y | y = Slice<starts = [1,-3], ends = [4,1000]>(x)
9 | float[5,6] x => float[] y | y = Slice<axes = [1], starts = [2], ends = [-1]>(x)
7 | float[1,3,1] x => float[] y | y = Squeeze<axes = [0]>(x)
7 | float[1,3,1] x => float[] y | y = Squeeze(x)
11 | float[3,4] x => float[] y | y = Unsqueeze<axes = [0,-1]>(x)
7 | float[2,6] x => float[] a, float[] b | a, b = Split<axis = 1, split = [1,5]>(x)
11 | float[2,6] x => float[] a, float[] b | a, b = Split<axis = -1>(x)
7 | float[3,7] x => float[] y, int64[] i | y, i = TopK<k = 4>(x)
10 | float[3,7] x => float[] y, int64[] i | k = Constant<value = int64[1] {2}>() y, i = TopK(x, k)
7 | float[2,3,4] x => float[] y | y = ReduceSum<axes = [1], keepdims = 0>(x)
12 | float[2,3,4] x => float[] y | y = ReduceSum<axes = [-1]>(x)
7 | float[2,3,4] x => float[] y | y = ReduceMean<axes = [0, 2]>(x)
17 | float[2,3,4] x => float[] y | y = ReduceMax(x)
7 | float[2,3,4] x, float[3] ws, float[3] wb, float[3] wm, float[3] p => float[] y | y = BatchNormalization<spatial = 1>(x, ws, wb, wm, p)
9 | float[3,4] x, float[2,3] z => float[] y | i = Constant<value = int64[2,3] {0, 1, 2, 1, 0, 1}>() y = Scatter(x, i, z)
7 | float[3,2] x, float[4,3] w, float[2,1] wb => float[] y | y = Gemm<transA = 1, transB = 1, alpha = 0.5>(x, w, wb)
7 | float[2,3] x, float[2,3] w => float[] y | y = Max(x, w)
7 | float[1,2,3,4] x => float[] y | y = Upsample<scales = [1.0, 1.0, 2.0, 3.0]>(x)
8 | float[1,2,3,4] x => float[] y | y = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 1.5]>(x)
8 | float[3,1] x => float[] y | s = Constant<value = int64[3] {2, 1, 4}>() y = Expand(x, s)
9 | float[2,3] x => float[] y | s = Shape(x) c = ConstantOfShape<value = float[1] {1.5}>(s) y = Add(x, c)
18 | float[2,4,3,3] x, float[2] ws, float[2] wb => float[2,4,3,3] y | y = GroupNormalization<num_groups = 2>(x, ws, wb)
"""
ROWS = [tuple(part.strip() for part in line.split("|")) for line in CASES.strip().splitlines()]


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("opset", "signature", "body"), ROWS, ids=[f"{opset}-{body[-60:]}" for opset, _, body in ROWS])
def test_older_forms_agree_with_onnxruntime(same, opset: str, signature: str, body: str, constant: bool) -> None:
    ins, outs = signature.split("=>")
    same(f"({ins}) => ({outs}) {{ {body} }}", int(opset), constant=constant, frozen="." if constant else None)


def test_a_softmax_of_an_older_opset_is_not_that_of_a_newer_one(same, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.frontends.onnx.table import RULES

    text = "(float[2,3,4] x) => (float[] y) { y = Softmax<axis = 1>(x) }"
    same(text, 12)
    same(text, 13)
    monkeypatch.setitem(RULES, "Softmax", lambda n: n.emit("softmax", n.value(), axis=n.int_attr("axis")))
    same(text, 13)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same(text, 12)


def test_statistics_for_every_position_are_refused(tmp_path: Path) -> None:
    text = "(float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3,4] y) { y = BatchNormalization<spatial = 0>(x, s, b, m, v) }"
    path = write_model(tmp_path / "a.onnx", text, 8)
    with pytest.raises(UnsupportedModel, match="spatial=0"):
        import_onnx(path)


def test_ir_versions_and_versions_of_other_domains_are_checked(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.onnx", "(float[2] x) => (float[2] y) { y = Relu(x) }")
    model = onnx.load(path)
    model.ir_version = 14
    onnx.save(model, path)
    import_onnx(path)
    model.ir_version = 15
    onnx.save(model, path)
    with pytest.raises(UnsupportedModel, match="IR version 15 is not supported, only 3 to 14"):
        import_onnx(path)
    model.ir_version = 10
    model.opset_import.append(helper.make_opsetid("com.microsoft", 2))
    onnx.save(model, path)
    with pytest.raises(UnsupportedModel, match=r"version 2 of domain com\.microsoft"):
        import_onnx(path)


# ---------------------------------------------------------------------------------------- inputs bound to values

RESHAPED = (
    "(float[2,6] x, int64[2] s, int64 unused) => (float[a,b] y) { t = Add(s, s) h = Div(t, two) y = Reshape(x, h) }"
)


def _reshaped(path: Path) -> Path:
    return write_model(path / "a.onnx", RESHAPED, arrays={"two": np.array([2])})


@pytest.mark.parametrize(
    ("text", "said", "needs"),
    [
        (
            "(float[2] x, int64 a, int64 b, int64 c) => (int64[?] y) { y = Range(a, b, c) }",
            "the start, the limit, the step are computed",
            "abc",
        ),
        (
            "(float[4,5] x, int64[1] s, int64[1] e, int64[1] a) => (float[?,?] y) { y = Slice(x, s, e, a) }",
            "the list of starts, the list of ends, the list of axes are computed",
            "sea",
        ),
        (
            "(float[4,5] x, int64[1] a, int64[2] p) => (float[?,?] y) { y = Pad(x, p, , a) }",
            "the padding, the list of axes are",
            "pa",
        ),
        (
            "(float[1,8,1] x, int64 l, int64 a) => (float[?,?,2] y) { y = DFT(x, l, a) }",
            "the length, the axis are computed",
            "la",
        ),
    ],
)
def test_all_operands_that_have_to_be_known_are_named_at_once(tmp_path: Path, text: str, said: str, needs: str) -> None:
    path = write_model(tmp_path / "model.onnx", text, opset=20)
    with pytest.raises(CannotImport) as caught:
        import_onnx(path)
    assert said in str(caught.value)
    assert f"they have to be known at import: {' '.join(f'--known {name}=VALUES' for name in needs)}" in str(
        caught.value
    )
    assert caught.value.needs == tuple(needs)


def test_the_error_names_the_inputs_that_have_to_be_known(tmp_path: Path) -> None:
    with pytest.raises(
        CannotImport, match="the shape is computed at run time from s, it has to be known at import: --known s=VALUES"
    ) as caught:
        import_onnx(_reshaped(tmp_path))
    assert caught.value.needs == ("s",)


def test_values_are_proposed_as_a_shell_takes_them(tmp_path: Path) -> None:
    """Names with blanks and operators come back from a shell as they are, and bind the input."""
    model = onnx.load(_reshaped(tmp_path))
    name = "shape of $x; 'all'"
    model.graph.input[1].name = name
    model.graph.node[0].input[:] = [name, name]
    onnx.save(model, tmp_path / "b.onnx")
    with pytest.raises(CannotImport) as caught:
        import_onnx(tmp_path / "b.onnx")
    _, _, proposed = next(line for line in str(caught.value).splitlines() if "--known" in line).partition("import: ")
    assert shlex.split(proposed) == ["--known", f"{name}=VALUES"]
    assert proposed.split() != shlex.split(proposed), "control: a shell would take the bare name apart"
    assert import_onnx(tmp_path / "b.onnx", known={name: [4, 3]}).bound.keys() == {name}


def test_no_value_is_proposed_for_the_only_input(tmp_path: Path) -> None:
    """Nothing would be left to run."""
    text = "(int64 n) => (float[?] y) { y = Range(zero, n, one) }"
    path = write_model(tmp_path / "a.onnx", text, arrays={"zero": np.array(0), "one": np.array(1)})
    with pytest.raises(CannotImport, match="the model has no other input") as caught:
        import_onnx(path)
    assert "--known" not in str(caught.value)
    assert caught.value.needs == ("n",)
    other = write_model(
        tmp_path / "b.onnx", text.replace("(int64 n)", "(int64 n, float x)"),
        arrays={"zero": np.array(0), "one": np.array(1)},
    )  # fmt: skip
    with pytest.raises(CannotImport, match="--known n=VALUES"):  # control
        import_onnx(other)


def test_no_value_is_proposed_for_the_only_sequence(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("s t", TensorProto.FLOAT, [2])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    result = helper.make_tensor_value_info("y", TensorProto.INT64, [])
    path = tmp_path / "a.onnx"
    for inputs, proposed in (([sequence], False), ([sequence, x], True)):
        graph = helper.make_graph([helper.make_node("SequenceLength", ["s t"], ["y"])], "g", inputs, [result])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
        with pytest.raises(UnsupportedModel, match="input s t: is not a tensor") as caught:
            import_onnx(path)
        assert ("--known 's t=...'" in str(caught.value)) == proposed


def test_sizes_are_proposed_as_a_shell_takes_them(tmp_path: Path) -> None:
    from penstock.commands.arguments import dims_of

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch size", "2*n", "-m", "a=b", "plain"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "a.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    with pytest.raises(UsageError) as caught:
        import_onnx(path)
    proposed = caught.value.hint.removeprefix("add ").partition(", or dims=")[0]
    assert proposed.endswith(" --dim plain=INT")
    words = shlex.split(proposed.replace("INT", "3"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", action="append")
    dims = dims_of(parser.parse_args(words).dim)
    assert dims == {"batch size": 3, "2*n": 3, "-m": 3, "a=b": 3, "plain": 3}
    assert import_onnx(path, dims=dims).module.inputs[0].type.dims == (3, 3, 3, 3, 3)
    with pytest.raises(SystemExit):  # control: bare names are taken apart
        parser.parse_args(["--dim", "batch", "size=3"])


@pytest.mark.parametrize("values", [[4, 3], (4.0, 3.0), np.array([4, 3], np.int32)])
def test_inputs_are_bound_to_values(tmp_path: Path, values: object) -> None:
    path = _reshaped(tmp_path)
    imported = import_onnx(path, known={"s": values})
    assert [v.name for v in imported.module.inputs] == ["x", "unused"]
    assert "inputs bound to values: s" in imported.report
    x = draw("x", np.dtype(np.float32), (2, 6))
    feeds = {"x": x, "unused": np.array(0)}
    (expected,) = judge(path, {**feeds, "s": np.array([4, 3])})
    np.testing.assert_array_equal(run(imported, feeds)[0], expected)
    assert not np.array_equal(run(import_onnx(path, known={"s": [3, 4]}), feeds)[0], expected)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"t": [1]}, "--known t: there is no such input, the model has x, s, unused"),
        ({"s": [1, 2, 3]}, r"--known s: the input has shape \[2\], the values have shape \[3\]"),
        ({"s": [1.5, 2]}, "--known s: the input has element type int64, which cannot hold"),
        ({"s": "ab"}, "--known s: needs numbers"),
    ],
)
def test_values_that_do_not_fit_are_errors(tmp_path: Path, known: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        import_onnx(_reshaped(tmp_path), known=known)


def test_a_value_says_the_sizes_of_its_dimensions(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.onnx", "(float[N,3] x, float[N,1] z) => (float[N,3] y) { y = Mul(x, z) }")
    assert str(import_onnx(path, known={"z": np.ones((4, 1))}).module.inputs[0].type) == "f32[4,3]"
    with pytest.raises(UsageError, match="dimension N is 4 there, elsewhere 5"):
        import_onnx(path, known={"z": np.ones((4, 1))}, dims={"N": 5})


def test_shapes_that_the_model_does_not_say_follow_from_its_inputs(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[2,3] x, float[] z) => (float[] y) { h = Relu(x) y = Mul(h, z) }'
    path = tmp_path / "a.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    with pytest.raises(UnsupportedModel, match="input z: has no shape"):
        import_onnx(path)
    imported = import_onnx(path, known={"z": [1, 2, 3]})
    x = draw("x", np.dtype(np.float32), (2, 3))
    np.testing.assert_array_equal(
        run(imported, {"x": x})[0], judge(path, {"x": x, "z": np.array([1, 2, 3], np.float32)})[0]
    )


# ---------------------------------------------------------------------------------------- functions

FUNCTIONS = """<ir_version: 10, opset_import: ["" : 20, "mine" : 1]>
g (float[2,3] x) => (float[2,3] y) {{ h = mine.twice<amount = 2.0>(x) [again] y = mine.{outer}(h) }}
<domain: "mine", opset_import: ["" : 11, "mine" : 1]>
twice <shift, amount: float = 3.0> (a) => (b) {{ c = Add(a, a) f = Constant<value_float: float = @amount>() d = Unsqueeze<axes = [0]>(c) e = Squeeze<axes = [0]>(d) b = Mul(e, f) }}
<domain: "mine", opset_import: ["" : 20, "mine" : 1]>
four (a) => (b) {{ c = mine.twice(a) b = mine.twice(c) }}
<domain: "mine", opset_import: ["" : 20]>
broken (a) => (b) {{ c = ImageDecoder(a) b = Add(c, a) }}"""


def _with_functions(path: Path, outer: str) -> Path:
    path.write_bytes(onnx.parser.parse_model(FUNCTIONS.format(outer=outer)).SerializeToString())
    return path


def test_functions_are_written_out_at_their_own_opset(tmp_path: Path) -> None:
    imported = import_onnx(_with_functions(tmp_path / "a.onnx", "four"))
    x = draw("x", np.dtype(np.float32), (2, 3))
    np.testing.assert_allclose(run(imported, {"x": x})[0], x * 4 * 36, rtol=1e-6)
    locs = {op.loc for op in imported.module.graphs["main"].ops}
    assert {"twice_0/Add_0", "again/twice_0/Add_0", "again/twice_1/Mul_4"} <= locs


def test_functions_of_one_name_are_told_apart_by_their_overload(tmp_path: Path) -> None:
    def function(overload: str, kind: str, domain: str, called: str = "") -> onnx.FunctionProto:
        node = helper.make_node(kind, ["a", "a"] if kind == "Add" else ["a"], ["b"], domain=domain, overload=called)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
        return helper.make_function("my", "F", ["a"], ["b"], [node], opsets, overload=overload)

    def model(*functions: onnx.FunctionProto) -> Path:
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
        graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="my", overload="one")], "g", [x], [y])
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
        path = tmp_path / "a.onnx"
        path.write_bytes(
            helper.make_model(graph, ir_version=10, opset_imports=opsets, functions=functions).SerializeToString()
        )
        return path

    x = draw("x", np.dtype(np.float32), (2, 3))
    imported = import_onnx(model(function("one", "F", "my", "two"), function("two", "Add", "")))
    np.testing.assert_array_equal(run(imported, {"x": x})[0], x + x)
    with pytest.raises(UsageError, match="must not be recursive"):
        import_onnx(model(function("one", "F", "my", "two"), function("two", "F", "my", "one")))


def test_errors_inside_of_functions_say_where(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"again/ImageDecoder_0 \(ai.onnx ImageDecoder\): no rule"):
        import_onnx(_with_functions(tmp_path / "a.onnx", "broken"))


def test_operators_without_a_rule_are_written_out_by_their_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.frontends.onnx import table

    for kind, text in {
        "HardSwish": "(float[2,3] x) => (float[2,3] y) { y = HardSwish(x) }",
        "Gelu": '(float[2,3] x) => (float[2,3] y) { y = Gelu<approximate = "tanh">(x) }',
        "LayerNormalization": "(float[2,3] x, float[3] s) => (float[2,3] y) { y = LayerNormalization<epsilon = 0.1>(x, s) }",
    }.items():
        monkeypatch.delitem(table.RULES, kind)
        path = write_model(tmp_path / f"{kind}.onnx", text)
        imported = import_onnx(path)
        assert any("ONNX's own definition" in line for line in imported.report)
        feeds = {v.name: draw(v.name, np.dtype(np.float32), v.type.dims) for v in imported.module.inputs}
        np.testing.assert_allclose(run(imported, feeds)[0], judge(path, feeds)[0], rtol=1e-5, atol=1e-6)


def test_a_known_sequence_needs_a_list(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2])
    result = helper.make_tensor_value_info("y", TensorProto.INT64, [])
    graph = helper.make_graph([helper.make_node("SequenceLength", ["s"], ["y"])], "g", [sequence], [result])
    path = tmp_path / "a.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    with pytest.raises(UnsupportedModel, match="input s: is not a tensor"):
        import_onnx(path)
    with pytest.raises(UsageError, match="takes a list of arrays"):
        import_onnx(path, known={"s": np.ones(2)})


# ---------------------------------------------------------------------------------------- the command line


def test_values_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.commands.parser import main

    path = str(_reshaped(tmp_path))
    np.save(tmp_path / "s.npy", np.array([4, 3]))
    for words in ("s=4,3", f"s={tmp_path / 's.npy'}"):
        assert main(["plan", path, "--known", words]) == 0
        assert "inputs bound to values: s" in "".join(capsys.readouterr())
    assert main(["verify", path, "--known", "s=2,6", "--backend", "numpy"]) == 0
    assert main(["plan", path]) == 3
    assert "--known s=VALUES" in capsys.readouterr().err
    for words, said in {
        "s": "expected NAME=NUMBERS",
        "s=a,b": "neither numbers",
        "s=absent.npy": "cannot be read",
        "t=1": "there is no such input",
    }.items():
        assert main(["plan", path, "--known", words]) == 2
        assert said in capsys.readouterr().err
