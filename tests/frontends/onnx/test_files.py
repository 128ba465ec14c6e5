"""Files as users have them: open dimensions, unsupported nodes, odd names, broken and hostile files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.external_data_helper
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.frontends.onnx import CannotImport, import_onnx
from penstock.ir.text import parse_module, print_module
from penstock.models import write_gpt, write_mlp
from penstock.support.errors import UnsupportedModel, UsageError

from .cases import compare, draw, judge, run, write_model

# ---------------------------------------------------------------------------------------- dimensions

OPEN = "(float[B,T,4] x, float[B,T] m, float[4,4] w) => (float[B,T,4] y) { y = MatMul(x, w) }"


def test_open_dimensions_are_all_named_with_their_flags(tmp_path: Path) -> None:
    path = write_model(tmp_path / "open.onnx", OPEN)
    with pytest.raises(UsageError) as caught:
        import_onnx(path, dims={"T": 3})
    text = str(caught.value)
    assert "input x, dimension 0 is B: --dim B=INT" in text
    assert "input m, dimension 0 is B: --dim B=INT" in text
    assert "--dim T=INT" not in text
    assert text.endswith("hint: add --dim B=INT, or dims={'B': INT} in Python")


def test_operators_that_nobody_has_are_named_beside_open_dimensions(tmp_path: Path) -> None:
    """Which needs no sizes; one of the domain's own, in a branch that may not be taken, is left to the import itself."""
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Magic", ["h"], ["y"], name="wand", domain="nobody"),
    ]
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 3]) for name in "xy"]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("nobody", 1)]
    path = tmp_path / "both.onnx"
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "both", kinds[:1], kinds[1:]), opset_imports=opsets, ir_version=10),
        path,
    )
    with pytest.raises(CannotImport) as caught:
        import_onnx(path)
    text = str(caught.value)
    assert "2 places" in text
    assert "wand (nobody Magic): operators of domain nobody are not supported" in text
    assert "input x, dimension 0 is B: --dim B=INT" in text
    assert "dims={'B': INT} in Python" in text
    with pytest.raises(CannotImport, match="one place"):
        import_onnx(path, dims={"B": 2})


def test_unknown_and_impossible_dimensions_are_errors(tmp_path: Path) -> None:
    path = write_model(tmp_path / "open.onnx", OPEN)
    with pytest.raises(
        UsageError,
        match=r"--dim batch=2: there is no such dimension, the model has B, T\n.*--dim T=0: a size must be 1 or more",
    ):
        import_onnx(path, dims={"B": 2, "batch": 2, "T": 0})
    static = write_model(tmp_path / "static.onnx", "(float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    with pytest.raises(UsageError, match="the model has no symbolic dimension"):
        import_onnx(static, dims={"B": 2})


def test_a_dimension_without_a_name_goes_by_input_and_axis(tmp_path: Path) -> None:
    path = write_model(tmp_path / "open.onnx", "(float[?,3] x) => (float[?,3] y) { y = Relu(x) }")
    with pytest.raises(UsageError, match=r"--dim x\.0=INT"):
        import_onnx(path)
    assert str(import_onnx(path, dims={"x.0": 5}).module.inputs[0].type) == "f32[5,3]"


def test_a_size_of_minus_one_is_a_dimension_without_a_name(tmp_path: Path) -> None:
    """As exporters of other frameworks write it, and onnxruntime reads it."""
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [-1, 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "minus", kinds[:1], kinds[1:])
    path = tmp_path / "minus.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    with pytest.raises(UsageError, match=r"input x, dimension 0 is open: --dim x\.0=INT"):
        import_onnx(path)
    imported = compare(path, {"x": draw("x", np.dtype(np.float32), (5, 3))}, dims={"x.0": 5})
    assert str(imported.module.inputs[0].type) == "f32[5,3]"
    assert not any("out of date" in line for line in imported.report)


# ---------------------------------------------------------------------------------------- what cannot be imported


def test_all_unsupported_nodes_are_listed_at_once(tmp_path: Path) -> None:
    text = """(float[2,3] x, int64[2] n) => (float[2,3] y, int64[k] u) {
      a = Relu(x)
      [first] b = Det(x)
      [second] c, d = TopK<axis = -1>(a, n)
      e = Gelu<approximate = "cubic">(a)
      f, i = Dropout(b)
      [third] u = NonZero(a)
      g = Multinomial(f)
      y = Add(e, g)
    }"""
    path = tmp_path / "many.onnx"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "acme.ops" : 1]> many {text}')
    model.graph.node.append(helper.make_node("Turbo", ["y"], ["z"], name="fourth", domain="acme.ops"))
    onnx.save(model, path)
    with pytest.raises(UnsupportedModel) as caught:
        import_onnx(path)
    rows = caught.value.what.splitlines()[1:]
    assert [row.split(":")[0].strip() for row in rows] == [
        "first (ai.onnx Det)",
        "second (ai.onnx TopK)",
        "Gelu_3 (ai.onnx Gelu)",
        "third (ai.onnx NonZero)",
        "Multinomial_6 (ai.onnx Multinomial)",
        "fourth (acme.ops Turbo)",
    ]
    assert "approximate=cubic" in rows[2]
    assert "domain acme.ops" in rows[5]
    assert caught.value.exit_code == 3


def test_an_operator_nobody_knows_is_unsupported_not_invalid(tmp_path: Path) -> None:
    path = write_model(tmp_path / "odd.onnx", "(float[2] x) => (float[2] y) { y = Frobnicate(x) }")
    with pytest.raises(UnsupportedModel, match=r"Frobnicate_0 \(ai.onnx Frobnicate\): no rule"):
        import_onnx(path)


def test_attributes_that_no_rule_reads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    text = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]> g (float[2,3] x) => (float[2,3] y) { y = com.microsoft.Gelu<speed = 3>(x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    with pytest.raises(UnsupportedModel, match="attribute speed is not supported"):
        import_onnx(path)


def test_shapes_computed_from_data_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.onnx", "(float[2,3] x, int64[1] s) => (float[k] y) { y = Reshape(x, s) }")
    with pytest.raises(UnsupportedModel, match="the shape is computed at run time"):
        import_onnx(path)


def test_a_huge_dimension_is_not_turned_round(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "a.onnx", "(float[1099511627776] x) => (int64[1] y) { y = ArgMax<select_last_index = 1>(x) }"
    )
    with pytest.raises(CannotImport, match="1099511627776 numbers would have to be made at import"):
        import_onnx(path)


# inputs | indices, those outside with a * | node; compiled code would take the last entry there.
OUTSIDE = """
float[2,3] x | int64[2] {3*, 0} | Gather<axis = 1>(x, i)
float[2,3] x | int64[2] {5000000*, 0} | Gather<axis = 1>(x, i)
float[2,3] x | int32[2] {-4*, 0} | Gather<axis = 1>(x, i)
float[2,3] x | int64[2,1] {0, 3*} | GatherElements<axis = 1>(x, i)
float[2,3] x | int32[2,1] {0, -4*} | GatherElements<axis = 1>(x, i)
float[2,3] x | int64[1,2] {1, 3*} | GatherND(x, i)
float[2,3] x | int64[2,1] {1, 2*} | GatherND(x, i)
float[2,3,4] x | int64[2,2] {1, 3, 3*, 0} | GatherND<batch_dims = 1>(x, i)
float[2,3] x, float[2,1] u | int64[2,1] {0, 3*} | ScatterElements<axis = 1>(x, i, u)
float[2,3] x, float[2,1] u | int64[2,1] {0, -4*} | ScatterElements<axis = 1, reduction = "max">(x, i, u)
float[2,3] x, float[1] u | int64[1,2] {1, 3*} | ScatterND(x, i, u)
float[2,3] x, float[1,3] u | int64[1,1] {-3*} | ScatterND<reduction = "mul">(x, i, u)
"""


@pytest.mark.parametrize("line", OUTSIDE.strip().splitlines())
def test_known_indices_outside_are_refused(tmp_path: Path, line: str) -> None:
    ins, indices, node = (part.strip() for part in line.split("|"))
    text = "({}) => (float[] y) {{ i = Constant<value = {}>() y = {} }}"
    wrong = write_model(tmp_path / "a.onnx", text.format(ins, indices.replace("*", ""), node), 18)
    feeds = {name: np.ones(shape, np.float32) for name, shape in _shapes(wrong).items()}
    with pytest.raises(CannotImport, match="is outside "):
        import_onnx(wrong)
    with pytest.raises(Exception, match=r"(?i)indice|index|out of"):
        judge(wrong, feeds)
    import_onnx(write_model(tmp_path / "b.onnx", text.format(ins, re.sub(r"-?\d+\*", "1", indices), node), 18))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in onnx.load(path).graph.input}


def test_element_types_without_counterpart_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.onnx", "(complex64[2] x, string[2] s) => (complex64[2] y) { y = Identity(x) }")
    with pytest.raises(UnsupportedModel, match=r"input x: element type complex64.*\n.*input s: element type string"):
        import_onnx(path)


@pytest.mark.parametrize("opset", [6, 29])
def test_other_opsets_are_refused(tmp_path: Path, opset: int) -> None:
    path = write_model(tmp_path / "a.onnx", "(float[2] x) => (float[2] y) { y = Relu(x) }", opset)
    with pytest.raises(UnsupportedModel, match=f"opset {opset} is not supported, only 7 to 28"):
        import_onnx(path)


# ---------------------------------------------------------------------------------------- broken files


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 64, b"not a model at all", None], ids=["empty", "zeros", "text", "missing"]
)
def test_a_file_that_is_no_model_is_a_usage_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.onnx"):
        import_onnx(path)
    with pytest.raises(UsageError, match="not a file"):
        import_onnx(tmp_path)


def test_a_truncated_file_is_a_usage_error_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write_mlp(tmp_path / "mlp.onnx", [3, 4, 2], 2).read_bytes()
    import_onnx(tmp_path / "mlp.onnx")
    path = tmp_path / "cut.onnx"
    for cut in range(1, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(UsageError):
            import_onnx(path)


def test_a_split_that_would_crash_shape_inference_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    node = helper.make_node("Split", ["x"], ["a", "b", "c"], axis=0, num_outputs=2)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [6 if name == "x" else 2]) for name in "xabc"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    with pytest.raises(UnsupportedModel, match="num_outputs is 2, but there are 3 results"):
        import_onnx(path)


def test_flipped_bytes_give_an_error_or_a_model_never_a_crash(tmp_path: Path) -> None:
    whole = write_mlp(tmp_path / "mlp.onnx", [3, 4, 2], 2).read_bytes()
    path = tmp_path / "flipped.onnx"
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        damaged[random.integers(len(whole))] ^= 1 << int(random.integers(8))
        path.write_bytes(bytes(damaged))
        try:
            import_onnx(path)
        except (UsageError, UnsupportedModel):
            refused += 1
    assert refused > 300


# ---------------------------------------------------------------------------------------- external data


def _external(folder: Path, location: str, **fields: int) -> Path:
    """A model whose weight lies at `location`; the bytes lie in folder/data.bin."""
    weight = np.arange(600, dtype=np.float32).reshape(20, 30)
    (folder / "data.bin").write_bytes(b"pad!" + weight.tobytes())
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[2,20] x) => (float[2,30] y) { y = MatMul(x, w) }'
    )
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[20, 30], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": 4, "length": weight.nbytes, **fields}.items():
        tensor.external_data.add(key=key, value=str(value))
    model.graph.initializer.append(tensor)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_is_mapped_and_hashed(tmp_path: Path) -> None:
    path = _external(tmp_path, "data.bin")
    imported = compare(path, {"x": draw("x", np.dtype(np.float32), (2, 20))}, 1e-4)
    assert isinstance(imported.weights["w"].base, np.memmap)
    with (tmp_path / "data.bin").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    assert import_onnx(path).source_hash != imported.source_hash


@pytest.mark.parametrize(
    "location",
    ["../data.bin", "a/../../data.bin", "/etc/hostname", "C:\\data.bin", "..\\data.bin", "", "absent.bin", "."],
)
def test_external_data_elsewhere_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "data.bin").write_bytes(bytes(4000))
    with pytest.raises(UsageError, match="tensor w: external data"):
        import_onnx(_external(folder, location))


def test_links_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4000))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "up").symlink_to(tmp_path)
    for location in ("link.bin", "up/secret.bin"):
        with pytest.raises(UsageError, match="leads out of the model's folder"):
            import_onnx(_external(folder, location))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"offset": 8}, "needs bytes 8 to 2408 of data.bin, which has only 2404"),
        ({"offset": -4}, "needs 2400 bytes"),
        ({"length": 2000}, "needs 2400 bytes, the file names 2000"),
        ({"length": 10**15}, "needs 2400 bytes"),
    ],
)
def test_sizes_of_external_data_are_checked(tmp_path: Path, fields: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        import_onnx(_external(tmp_path, "data.bin", **fields))


# ---------------------------------------------------------------------------------------- names


def test_odd_names_are_respelled_without_meeting(tmp_path: Path) -> None:
    names = ["a b", "a_b", "a%b", "größe", "w;x\n", "", "@w", "a_b.1"]
    weights = {name or "empty": draw(name or "empty", np.dtype(np.float32), (3,)) for name in names}
    nodes, last = [], "in put"
    for i, name in enumerate(weights):
        out = "out put" if i == len(weights) - 1 else f"v {i}"
        nodes.append(helper.make_node("Add", [last, name], [out], name=f"node; {name}\n"))
        last = out
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("in put", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("out put", TensorProto.FLOAT, [2, 3])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = tmp_path / "my model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    x = draw("x", np.dtype(np.float32), (2, 3))
    imported = import_onnx(path)
    assert imported.module.name == "my_model"
    assert parse_module(print_module(imported.module)) == imported.module
    np.testing.assert_allclose(
        run(imported, {imported.module.inputs[0].name: x})[0], judge(path, {"in put": x})[0], rtol=1e-6
    )
    original = {imported.names.get(name, name): array for name, array in imported.weights.items()}
    assert original.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(original[name], array)
    assert {"a_b", "a_b.1"} <= set(imported.weights)  # names that need no change keep theirs
    assert imported.names[imported.module.outputs[0]] == "out put"


def test_unnamed_nodes_are_called_by_type_and_place(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.onnx", "(float[2] x) => (float[2] y) { h = Relu(x) [named] y = Neg(h) }")
    assert [op.loc for op in import_onnx(path).module.graphs["main"].ops] == ["Relu_0", "named"]


def test_imports_are_deterministic(tmp_path: Path) -> None:
    path = write_gpt(tmp_path / "gpt.onnx", layers=2, width=8, heads=2, vocab=7, positions=4, batch=2)
    code = f"from penstock.frontends.onnx import CannotImport, import_onnx\nfrom penstock.ir.text import print_module\ni = import_onnx({str(path)!r})\nprint(print_module(i.module), i.report, i.source_hash)"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "module @gpt" in texts.pop()
