"""Weights of fewer bits: which are rounded and how, what the module then means, and that it survives its text and a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Module
from penstock.ir.interpreter import derived
from penstock.ir.interpreter.derived import DerivedWeights
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.text import parse_module, print_module
from penstock.models import write_gpt
from penstock.passes.rewrite.quantise import QuantiseOptions, quantise
from penstock.support.errors import UsageError, VerifyError

TEXT = """module @m {
  input %x : f32[3,64]
  input %i : i64[4]
  output %y
  output %e
  var @a : f32[64,96] param
  var @b : f32[40,96] param
  var @table : f32[50,64] param
  var @odd : f32[40,30] param
  graph @main(%x : f32[3,64], %i : i64[4]) {
    %a : f32[64,96] = read(@a)
    %h : f32[3,96] = matmul(%x, %a) ; first
    %r : f32[3,96] = relu(%h)
    %b : f32[40,96] = read(@b)
    %g : f32[3,40] = matmul(%r, %b, tb=true)
    %t : f32[3,40] = relu(%g)
    %odd : f32[40,30] = read(@odd)
    %y : f32[3,30] = matmul(%t, %odd)
    %table : f32[50,64] = read(@table)
    %e : f32[4,64] = gather(%table, %i)
    return %y, %e
  }
}
"""


def weights_of(module: Module) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(var.type.dims).astype(np.float32) for name, var in module.vars.items()}


def results(module: Module, weights: dict[str, np.ndarray]) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    store = DictStore(initial_arrays(module, weights, list(module.vars), "typed"))
    arrays = [rng.standard_normal((3, 64)).astype(np.float32), np.array([0, 3, -1, 49])]
    return run_graph(module.graphs["main"], arrays, store)


@pytest.mark.parametrize(("bits", "most"), [(16, 0.01), (8, 0.03), (4, 0.25)])
def test_the_module_means_nearly_the_same(bits: int, most: float) -> None:
    module = parse_module(TEXT)
    weights = weights_of(module)
    rounded = quantise(module, QuantiseOptions(bits))
    assert print_module(parse_module(print_module(rounded))) == print_module(rounded)
    for ours, theirs in zip(results(rounded, weights), results(module, weights), strict=True):
        gap = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert 0 < gap < most


def test_what_is_rounded() -> None:
    """Rows of products; an embedding keeps 8 bits; rows of 40 elements, the rows of @odd's transpose, make no group."""
    rounded = quantise(parse_module(TEXT), QuantiseOptions(4))
    text = print_module(rounded)
    assert "var @a.q4 : u8[96,32] param from @a as codes4.32.turned" in text
    assert "var @b.s4 : f16[40,3] param from @b as scales4.32" in text
    assert "var @table.q8 : i8[50,64] param from @table as codes8.32" in text
    assert "var @odd : f32[40,30] param\n" in text
    assert {"a", "b", "table"}.isdisjoint(rounded.vars)
    assert "matmul_q(%x, %a.q4, %a.s4, bits=4, group=32, act=i8) ; first" in text
    kept = quantise(parse_module(TEXT), QuantiseOptions(4, keep=("^a$", "^table$")))
    assert {"a", "table", "b.q4"} <= set(kept.vars)


def test_a_weight_that_something_else_reads_stays() -> None:
    text = TEXT.replace("%r : f32[3,96] = relu(%h)", "%s : f32[64,96] = relu(%a)\n    %r : f32[3,96] = matmul(%x, %s)")
    assert {"a", "b.q8"} <= set(quantise(parse_module(text), QuantiseOptions(8)).vars)
    with pytest.raises(UsageError, match="bits=5"):
        quantise(parse_module(TEXT), QuantiseOptions(5))


def dequantised(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Written out element by element, as the form says it."""
    rows, columns = len(codes), codes.shape[1] * 8 // bits
    result = np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for k in range(columns):
            q = int(codes[i, k]) if bits == 8 else (int(codes[i, k // 2]) >> 4 * (k % 2) & 15) - 8
            result[i, k] = q * np.float32(scales[i, k // 32])
    return result


@pytest.mark.parametrize("bits", [8, 4])
def test_elements_are_within_a_step_of_their_group(bits: int) -> None:
    module = parse_module(TEXT)
    weights = weights_of(module)
    weights["b"][0, :32], weights["b"][1, 5] = 0.0, 40.0
    made = DerivedWeights(weights, quantise(module, QuantiseOptions(bits)).vars)
    scales, codes = (np.asarray(made[f"b.{part}{bits}"]) for part in "sq")
    again = dequantised(codes, scales, bits)
    steps = np.abs(scales.astype(np.float32)).repeat(32, 1)
    # In 4 bits the far end of a group may be cut off.
    assert (np.abs(again - weights["b"]) <= steps * (0.51 if bits == 8 else 2.3)).all()
    assert np.array_equal(again[0, :32], np.zeros(32))
    neighbours = dequantised(codes, np.roll(scales, 1, 1), bits)
    assert not (np.abs(neighbours - weights["b"]) <= steps * 2.3).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_are_rounded_one_after_the_other_are_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are rounded in pieces that fit the memory. The control: the piece is one row."""
    module = parse_module(TEXT)
    made = DerivedWeights(weights_of(module), quantise(module, QuantiseOptions(bits)).vars)
    names = [name for name in made if name.endswith((f".q{bits}", f".s{bits}"))]
    whole = {name: np.asarray(made[name]) for name in names}
    asked = []
    rounded = derived._of_group
    monkeypatch.setattr(derived, "_of_group", lambda *how: asked.append(how[2].shape[0]) or rounded(*how))
    monkeypatch.setattr(derived, "_CHUNK", 1)
    assert all(np.array_equal(np.asarray(made[name]), whole[name]) for name in names)
    assert set(asked) == {1}


def test_weights_that_cannot_be_rounded_are_named() -> None:
    module = parse_module(TEXT)
    rounded = quantise(module, QuantiseOptions(8))
    for wrong, message in ((np.nan, "not finite"), (1e9, "too large")):
        weights = weights_of(module)
        weights["b"][3, 7] = wrong
        with pytest.raises(VerifyError, match=message):
            np.asarray(DerivedWeights(weights, rounded.vars)["b.q8"])


def test_shares_of_bytes(tmp_path: Path) -> None:
    """Scales, norms and tables included, where tables are a small part of all weights; they have 8 bits at least. The
    control is a model that is half of tables."""
    of_file, of_tables = (
        ps.from_onnx(
            write_gpt(tmp_path / f"{vocab}.onnx", batch=1, layers=2, width=512, heads=2, vocab=vocab, positions=16)
        )
        for vocab in (64, 6144)
    )
    shares = {}
    for name in ("f32", "bf16", "int8", "int4"):
        for model in (of_file, of_tables):
            plan = ps.plan(model, ps.Cluster.local(1, threads=[1]), weights=name)
            size = sum(var.type.nbytes for var in plan.module.vars.values() if var.init == "file")
            shares[name, model is of_tables] = size / sum(x.nbytes for x in model.imported.weights.values())
    assert shares["f32", False] == pytest.approx(1, abs=0.001)
    assert 0.28 < shares["bf16", False] < 0.51
    assert 0.16 < shares["int8", False] < 0.28
    assert 0.14 < shares["int4", False] < 0.16
    assert shares["int8", True] < 0.28
    assert shares["int4", True] > 0.16


@pytest.mark.parametrize(("name", "share", "most"), [("bf16", 0.51, 0.02), ("int8", 0.275, 0.05), ("int4", 0.18, 0.5)])
def test_a_bundle_has_few_bytes_and_computes_what_it_says(name: str, share: float, most: float, tmp_path: Path) -> None:
    """Compiled, against the interpreter on the same rounded weights; and in the size of its files."""
    model = ps.from_onnx(
        write_gpt(tmp_path / "gpt.onnx", batch=1, layers=2, width=128, heads=2, vocab=64, positions=16)
    )
    tokens = np.random.default_rng(0).integers(0, 64, (1, 16))
    plan = ps.plan(model, ps.Cluster.local(1, threads=[1]), weights=name)
    bundle = ps.compile(plan, tmp_path / "bundle")
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.parent.name in ("weights", "source"))
    assert size < share * sum(array.nbytes for array in model.imported.weights.values()) + 30000
    (ours,) = ps.load(bundle)(tokens).values()
    for module, limit in ((plan.reference, 1e-4), (model.module, most)):
        store = DictStore(initial_arrays(module, model.imported.weights, list(module.vars), "typed"))
        (whole,) = run_graph(module.graphs["main"], [tokens], store)
        assert np.abs(ours - whole).max() < limit * np.abs(whole).max()
    if name == "int8":
        assert np.abs(ours - whole).max() > 1e-4 * np.abs(whole).max()
