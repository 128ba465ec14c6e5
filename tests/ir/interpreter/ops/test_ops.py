"""Every row of the op table in NumPy against torch, on the sample table: same values, declared types, and what is at the ends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles.torch_meaning import MEANING, TORCH_DTYPES
from samples import HALF, RELATED, SAMPLES, Sample, samples_of, touched

from penstock.ir.graph import Value
from penstock.ir.interpreter.ops import NUMPY, apply_op, erf
from penstock.ir.ops import OPS, complete_attrs, make
from penstock.ir.types import FLOATS, TensorType, dtype_of, numpy_dtype, parse_type
from penstock.runtime.state.tensors import fill
from penstock.support.errors import VerifyError

# Of these torch has memory, but hardly a function: they are computed as i64, of which they are the last bits.
FEW = ("u64", "u32", "u16")
PURE = [name for name, row in OPS.items() if row.family not in ("state", "collective")]

# Largest error allowed, as a part of the largest value of the result: a few roundings of the element type.
TOLERANCE = {"f64": 1e-11, "f32": 3e-6, "f16": 1e-3, "bf16": 8e-3}
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def run(
    kind: str, arrays: list[np.ndarray], results: int = 1, precision: str = "typed", **attrs: object
) -> tuple[np.ndarray, ...]:
    ins = [Value(f"x{i}", TensorType(dtype_of(x.dtype), x.shape)) for i, x in enumerate(arrays)]
    return apply_op(make(kind, ins, [f"y{i}" for i in range(results)], **attrs), arrays, precision)


def in_torch(s: Sample, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The results of a sample as torch sees it, in float64 where they are floats."""
    dtypes = [parse_type(t).dtype for t in s.types]
    wide = [
        np.float64 if d in FLOATS else np.int64 if d in FEW else a.dtype for a, d in zip(arrays, dtypes, strict=True)
    ]
    if s.kind == "bitcast":  # is about the bits as they are
        found = MEANING["bitcast"](
            fill(torch.empty(arrays[0].shape, dtype=TORCH_DTYPES[dtypes[0]]), arrays[0]), **s.attrs
        )
        return [found.double().numpy() if found.is_floating_point() else found.numpy()]
    tensors = [torch.tensor(a.astype(w)) for a, w in zip(arrays, wide, strict=True)]
    attrs = {name: "i64" if value in FEW else value for name, value in complete_attrs(s.op).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # means of nothing
        found = MEANING[s.kind](*tensors, **attrs)
    results = [t.detach() for t in (found if isinstance(found, tuple) else (found,))]
    own = [v.type.dtype for v in s.op.outs]
    return [
        (t.double() if t.is_floating_point() else t).numpy() if d not in FEW else t.numpy().astype(numpy_dtype(d))
        for t, d in zip(results, own, strict=True)
    ]


def difference(found: np.ndarray, expected: np.ndarray, dtype: str) -> str:
    """What is wrong with a result; empty if nothing is."""
    if found.shape != expected.shape or found.dtype != numpy_dtype(dtype):
        return f"{found.dtype}{list(found.shape)} instead of {dtype}{list(expected.shape)}"
    if dtype not in FLOATS:
        return "" if np.array_equal(found, expected) else f"{found} instead of {expected}"
    found = found.astype(np.float64)
    if not np.array_equal(np.isnan(found), np.isnan(expected)):
        return "nan in different places"
    with np.errstate(over="ignore"):
        expected = expected.astype(numpy_dtype(dtype)).astype(np.float64) if dtype in HALF else expected
    if not np.array_equal(np.where(np.isinf(found), found, 0), np.where(np.isinf(expected), expected, 0)):
        return "inf in different places"
    finite = np.isfinite(expected)
    error = np.abs(found[finite] - expected[finite]).max(initial=0.0)
    scale = np.abs(expected[finite]).max(initial=0.0)
    # Results that are exactly 0 on paper come out as rounding errors of numbers around 1.
    return f"error {error:.1e} at scale {scale:.1e}" if error > TOLERANCE[dtype] * max(scale, 1e-3) else ""


def wrong_samples(kind: str) -> list[str]:
    """What the NumPy rule of a row and torch do not agree on."""
    wrong = []
    for s in samples_of(kind):
        arrays = s.arrays()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = apply_op(s.op, [a.copy() for a in arrays])
        for v, found, expected in zip(s.op.outs, results, in_torch(s, arrays), strict=True):
            if what := difference(found, expected, v.type.dtype):
                wrong.append(f"{s} %{v.name}: {what}")
    return wrong


@pytest.mark.parametrize("kind", PURE)
def test_rule_equals_torch(kind: str) -> None:
    assert not wrong_samples(kind)


def test_every_row_has_a_rule_and_a_judge() -> None:
    assert set(NUMPY) == {*PURE, "reshard"}
    assert set(MEANING) == set(PURE)


@pytest.mark.parametrize("kind", PURE)
def test_control_one_wrong_element_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NUMPY, kind, touched(NUMPY[kind]))
    assert wrong_samples(kind)


NEAR_MISSES: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
    "gelu": lambda x, a: BEFORE["gelu"](x, {**a, "approximate": "tanh" if a["approximate"] == "none" else "none"}),
    "avg_pool": lambda x, a: BEFORE["avg_pool"](x, {**a, "include_pad": not a["include_pad"]}),
    "layer_norm": lambda x, a: BEFORE["layer_norm"](x, {**a, "eps": 1e-4}),
    "max_pool_grad": lambda x, a: (BEFORE["max_pool_grad"]([v[..., ::-1] for v in x], a)[0][..., ::-1],),
    "div": lambda x, a: (np.floor_divide(x[0], x[1]) if x[0].dtype.kind == "i" else x[0] / x[1],),
    "argmax": lambda x, a: (x[0].shape[a["axis"]] - 1 - np.argmax(np.flip(x[0], a["axis"]), a["axis"]),),
}
BEFORE = dict(NUMPY)


@pytest.mark.parametrize("kind", sorted(NEAR_MISSES))
def test_control_a_near_miss_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NUMPY, kind, NEAR_MISSES[kind])
    assert wrong_samples(kind)


@pytest.mark.parametrize("kind", PURE)
def test_precision_f64_is_the_float64_result(kind: str) -> None:
    """What the recurrence runs in: the same operation on wider operands."""
    for s in [s for s in samples_of(kind) if s.dtype == "f32" and "dtype" not in s.attrs][:3]:
        wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in s.arrays()]
        wide = RELATED[kind](wide, complete_attrs(s.op)) if kind in RELATED else wide
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = apply_op(s.op, [a.copy() for a in wide], "f64")
        for v, found, expected in zip(s.op.outs, results, in_torch(s, wide), strict=True):
            what = difference(found, expected, "f64" if v.type.dtype in FLOATS else v.type.dtype)
            assert not what, f"{s}: {what}"


@pytest.mark.parametrize("half", HALF)
def test_half_precision_is_computed_wide_and_rounded_once(half: str) -> None:
    x = normal(8, 300).astype(numpy_dtype(half))
    (total,) = run("sum", [x], axes=(1,))
    assert total.dtype == x.dtype
    np.testing.assert_array_equal(total, x.astype(np.float64).sum(1).astype(x.dtype))
    (product,) = run("matmul", [x, x], tb=True)
    np.testing.assert_array_equal(product, (x.astype(np.float32) @ x.astype(np.float32).T).astype(x.dtype))


def test_erf_is_accurate_to_the_last_place() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20001), 10.0 ** np.linspace(-300, 2, 500), [0.46875, 4.0, -4.0, 1e300]])
    expected = np.array([math.erf(v) for v in x])
    assert np.max(np.abs(erf(x) - expected) / np.maximum(np.abs(expected), 1e-300)) < 1e-15
    assert np.isnan(erf(np.array(np.nan)))
    np.testing.assert_array_equal(erf(np.array([np.inf, -np.inf, 0.0])), [1.0, -1.0, 0.0])


def test_infinities_are_results() -> None:
    with np.errstate(all="raise"):
        assert run("log", [np.array([0.0])])[0][0] == -np.inf
        assert run("exp", [np.array([1e5])])[0][0] == np.inf
        assert np.isnan(run("sub", [np.array([np.inf]), np.array([np.inf])])[0][0])


@pytest.mark.parametrize(
    ("kind", "indices", "results"),
    [("gather", [4], 1), ("gather", [-5], 1), ("cross_entropy", [0, 1, 5, 2], 2), ("cross_entropy", [0, -1, 1, 2], 2)],
)
def test_index_out_of_range_is_an_error(kind: str, indices: list[int], results: int) -> None:
    with pytest.raises(VerifyError, match="is outside"):
        run(kind, [normal(4, 5), np.array(indices)], results)


def test_the_samples_are_all_judged() -> None:
    assert sum(len(samples_of(kind)) for kind in PURE) == len(SAMPLES)
