"""Results that a caller may write into: they lie in the memory of no input, variable, constant or other result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.backends.bundle.writer import Provenance, write_bundle
from penstock.backends.registry import backend_of
from penstock.ir.text import parse_module
from penstock.runtime.job import in_process
from penstock.runtime.job.in_process import LoadedModel


def toy(columns: int, lines: str, outputs: str) -> str:
    """The text of a model on one device, with an input %x of two rows and a variable @table."""
    names = "\n".join(f"  output {name}" for name in outputs.split(", "))
    return f"""module @toy facts(staged) {{
  device cpu:0
  stage 0 on cpu:0
  input %x : f32[2,{columns}]
{names}
  var @table : f32[2,4] stage 0 param
  graph @s0.F(%x : f32[2,{columns}]) {{{lines}    return {outputs}
  }}
  schedule forward microbatches 1 {{
    rank 0 start:
    rank 0 batch: 0F1
  }}
}}
"""


# Outputs that may lie in the memory of an input, of another output or of a variable, and a scalar.
SHARING = toy(
    3,
    """
    %flat : f32[6] = reshape(%x, shape=[6])
    %y : f32[2,3] = relu(%x)
    %again : f32[6] = reshape(%y, shape=[6])
    %t : f32[2,4] = read(@table)
    %total : f32[] = sum(%y, axes=[0, 1])
""",
    "%x, %flat, %y, %again, %t, %total",
)
# A constant among the outputs, which another output is computed from.
CONSTANT = toy(
    4,
    """
    %c : f32[4] = const(value=[0.0,2.0,4.0,6.0], dtype=f32, shape=[4])
    %t : f32[2,4] = read(@table)
    %z : f32[2,4] = add(%x, %t)
    %y : f32[2,4] = add(%z, %c)
""",
    "%y, %c",
)


def agree(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["tvm", "numpy"])
def test_outputs_are_the_callers(backend, tmp_path, monkeypatch):
    bundle, table = sharing(tmp_path, backend)
    x = np.array([[1, -2, 3], [4, -5, 6]], np.float32)
    y = np.maximum(x, 0)
    expected = {"x": x, "flat": x.ravel(), "y": y, "again": y.ravel(), "t": table, "total": y.sum()[None]}
    expected = {name: array.copy() for name, array in expected.items()}

    def spoil(model: LoadedModel) -> None:
        """Write into every output of a call, one by one: no other output, no later call and no input changes."""
        for name in expected:
            kept, spoilt = model(x), model(x)
            spoilt[name] += 100
            agree(kept, expected)
            agree({other: array for other, array in spoilt.items() if other != name} | {name: kept[name]}, expected)
            agree(model(x), expected)

    spoil(ps.load(bundle))
    # Without copies an output that is an input is the caller's array. The interpreter always copies.
    monkeypatch.setattr(in_process, "_sharing", lambda results, others: frozenset())
    if backend == "tvm":
        with pytest.raises(AssertionError):
            spoil(ps.load(bundle))


# A collective over an axis with one device, and the rank's coordinate there.
ALONE = """module @alone facts(local, staged) {
  device cpu:0
  mesh @s0 (tp=1) cpu:0
  stage 0 on s0
  input %x : f32[2,3]
  output %y
  var @table : f32[2,4] stage 0 param
  graph @s0.F(%x : f32[2,3], %mesh.tp : i64[]) {
    %sum : f32[2,3] = all_reduce(%x, over=tp)
    %at : f32[] = cast(%mesh.tp, dtype=f32)
    %y : f32[2,3] = add(%sum, %at)
    return %y
  }
  schedule forward microbatches 1 {
    rank 0 start:
    rank 0 batch: 0F1
  }
}
"""


@pytest.mark.parametrize("backend", ["numpy", "tvm"])
def test_a_rank_that_is_its_group_alone_does_its_collectives(backend: str, tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(ps.load(sharing(tmp_path, backend, ALONE)[0])(x)["y"], x)


@pytest.mark.parametrize("backend", ["tvm", "numpy"])
def test_constants_among_results_are_the_callers(tmp_path, backend):
    """What a caller writes into a result changes neither the constant nor what is computed from it."""
    bundle, table = sharing(tmp_path, backend, CONSTANT)
    model, x = ps.load(bundle), np.ones((2, 4), np.float32)
    for _ in range(3):
        result = model(x)
        np.testing.assert_array_equal(result["c"], [0, 2, 4, 6])
        np.testing.assert_array_equal(result["y"], x + table + [0, 2, 4, 6])
        result["c"] += 100


def sharing(folder: Path, backend: str, text: str = SHARING) -> tuple[Path, np.ndarray]:
    module = parse_module(text, "toy.ir")
    out = folder / "compiled"
    out.mkdir()
    names = backend_of(backend).compile_stages(module, [0], out)[0]
    table = np.arange(8, dtype=np.float32).reshape(2, 4)
    bundle = write_bundle(
        folder / "bundle",
        module,
        {0: [out / name for name in names]},
        {"table": table},
        backend=backend,
        plan={},
        provenance=Provenance("0" * 64),
    )
    return bundle.path, table


def test_results_of_whole_microbatches_are_those_of_a_job(tmp_path):
    """A scalar output belongs to a microbatch: there is one for each, on the short way and on the long one."""
    model = ps.load(sharing(tmp_path, "numpy")[0])
    x = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    np.testing.assert_allclose(model(x)["total"], np.maximum(x, 0).reshape(3, -1).sum(1), rtol=1e-5)
    np.testing.assert_allclose(model(x[:2])["total"], np.maximum(x[:2], 0).sum()[None], rtol=1e-5)
