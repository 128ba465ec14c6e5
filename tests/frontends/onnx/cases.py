"""The comparison that tests of the importer of ONNX rest on: our import run by the NumPy interpreter, against onnxruntime on the same file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime

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


def compare(
    path: Path,
    feeds: Mapping[str, np.ndarray],
    tolerance: float = 2e-5,
    through: Callable[[np.ndarray], np.ndarray] = np.asarray,
    **options: object,
) -> Imported:
    """Import, check, print and parse, run, and compare every output with onnxruntime's, both `through` a function."""
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
        np.testing.assert_allclose(through(got), through(want), rtol=tolerance, atol=tolerance)
    return imported
