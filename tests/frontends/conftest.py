"""The comparison every importer test rests on: our import run by the NumPy interpreter, against onnxruntime on the same file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from torch._export import utils as torch_export

from penstock.frontends.onnx import Imported, import_onnx
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import check

Arrays = dict[str, np.ndarray]


def write_model(path: Path, text: str, opset: int = 20, arrays: Mapping[str, np.ndarray] | None = None) -> Path:
    """A model from ONNX's text form, `(inputs) => (outputs) { nodes }`; `arrays` become initializers."""
    header = f'<ir_version: 10, opset_import: ["" : {opset}]>'
    model = onnx.parser.parse_model(f"{header} mini {text}")
    for name, array in (arrays or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)  # the format wants shapes on outputs
    del model.graph.value_info[:]
    onnx.save(model, path)
    return path


def draw(name: str, dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Seeded random elements: small integers, coin flips, normal numbers; names that begin with p are positive."""
    random = np.random.default_rng([seed, *name.encode()])
    if dtype == np.bool_:
        return random.random(shape) < 0.5
    if np.issubdtype(dtype, np.integer):
        return random.integers(0 if name[0] == "p" else -3, 4, shape).astype(dtype)
    drawn = random.standard_normal(shape)
    return np.asarray(np.abs(drawn) + 0.1 if name[0] == "p" else drawn).astype(dtype)


def judge(path: Path, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # Else products of 8 bits saturate in 16 on processors that have AVX2 and no VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def run(imported: Imported, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    main = imported.module.graphs["main"]
    return [np.asarray(a) for a in run_graph(main, dict(feeds), DictStore(imported.weights))]


def compare(path: Path, feeds: Mapping[str, np.ndarray], tolerance: float = 2e-5, **options: object) -> Imported:
    """Import, check, print and parse, run, and compare every output with onnxruntime's."""
    imported = import_onnx(path, **options)  # type: ignore[arg-type]
    check(imported.module, ("typed",))
    assert parse_module(print_module(imported.module)) == imported.module
    assert set(imported.weights) == set(imported.module.vars)
    for name, var in imported.module.vars.items():
        assert imported.weights[name].shape == var.type.shape
    expected, found = judge(path, feeds), run(imported, feeds)
    assert len(found) == len(expected)
    for want, got in zip(expected, found, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return imported


@pytest.fixture(scope="module", autouse=True)
def _operators_looked_up_once() -> Iterator[None]:
    """torch.export looks all operators up for each of two dozen namespaces, twice per program: a third of the time of small programs. Tests
    here register none."""
    torch_export._materialize_cpp_cia_ops()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_export, "_materialize_cpp_cia_ops", lambda: None)
        yield


@pytest.fixture
def same(tmp_path: Path) -> Callable[..., Imported]:
    """same(text, opset): inputs are drawn by their types; those whose name begins with w, or all if `constant`, are initializers instead."""

    def check_text(
        text: str, opset: int = 20, tolerance: float = 2e-5, constant: bool = False, **options: object
    ) -> Imported:
        path = write_model(tmp_path / "mini.onnx", text, opset)
        model = onnx.load(path)
        feeds: Arrays = {}
        for value in list(model.graph.input):
            kind = value.type.tensor_type
            shape = tuple(d.dim_value for d in kind.shape.dim)
            array = draw(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape)
            if value.name[0] == "w" or constant:
                model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
                model.graph.input.remove(value)
            else:
                feeds[value.name] = array
        onnx.save(model, path)
        return compare(path, feeds, tolerance, **options)

    return check_text


@pytest.fixture
def seeded() -> None:
    """The weights that modules of torch draw, and the examples, are the same in every run."""
    torch.manual_seed(0)
