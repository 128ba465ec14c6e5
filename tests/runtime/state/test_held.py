"""Weights of inference are held once: the elements that only packed operands are made of are let go, and read again where they are asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.models import write_gpt, write_mlp


def compiled(folder: Path, sizes: list[int], batch: int = 2) -> tuple[Path, dict[str, np.ndarray]]:
    model = ps.from_onnx(write_mlp(folder / "mlp.onnx", sizes, batch=batch))
    bundle = ps.compile(ps.plan(model, ps.Cluster.local(1, threads=[1])), folder / "bundle")
    return bundle, {name: np.asarray(array) for name, array in model.imported.weights.items()}


def test_weights_that_were_let_go_are_read_again(tmp_path: Path) -> None:
    bundle, weights = compiled(tmp_path, [64, 128, 32])
    model = ps.load(bundle)
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    (before,) = model(x).values()
    matrices = [name for name, array in weights.items() if array.ndim == 2]
    places = {model.store.single[name].data_ptr() for name in matrices}
    assert len(matrices) == 2
    assert len(places) == 1, "stand-ins lie in one place"
    for name, array in weights.items():
        np.testing.assert_array_equal(model.store.newest(name).numpy(), array)
    with ps.open(bundle) as job:
        np.testing.assert_array_equal(next(iter(job.infer({"x": x}).values())), before)
        held = job.parameters()
        job.save(tmp_path / "ckpt")
    for name, array in weights.items():
        np.testing.assert_array_equal(held[name], array)
    (again,) = ps.load(bundle, checkpoint=tmp_path / "ckpt")(x).values()
    np.testing.assert_array_equal(again, before)


def test_a_table_that_lookups_read_as_it_is_stays(tmp_path: Path) -> None:
    model = ps.from_onnx(write_gpt(tmp_path / "gpt.onnx", batch=1, layers=1, width=32, heads=2, vocab=64, positions=8))
    loaded = ps.load(ps.compile(ps.plan(model, ps.Cluster.local(1, threads=[1])), tmp_path / "bundle"))
    gone = {name for name in loaded.store.single if name in loaded.store._gone}
    tables = {name for name, array in model.imported.weights.items() if array.shape in ((64, 32), (8, 32))}
    products = {op.ins[1].name for op in model.module.graphs["main"].ops if op.kind == "matmul"} & gone
    assert products
    assert not tables & gone - products


GROWN = """
import gc, sys
import numpy as np
import penstock as ps
from penstock.runtime.state.store import Store
from penstock.runtime.telemetry.resident import resident_bytes
if sys.argv[2] == "twice":
    Store.let_go = lambda self, name, stand_in: None
model = ps.load(sys.argv[1])
model(np.zeros((1, 2048), np.float32))
gc.collect()
print(resident_bytes() - model.base_bytes)
"""


def grown(bundle: Path, how: str) -> int:
    """How much a process of its own grows by a model."""
    command = [sys.executable, "-c", GROWN, str(bundle), how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


@pytest.mark.slow
def test_memory_of_a_loaded_model_is_that_of_its_weights(tmp_path: Path) -> None:
    bundle, weights = compiled(tmp_path, [2048, 2048, 2048, 2048, 16], batch=1)
    size = sum(array.nbytes for array in weights.values())
    assert grown(bundle, "once") < 1.5 * size
    assert grown(bundle, "twice") > 1.8 * size, "the control: both copies"
