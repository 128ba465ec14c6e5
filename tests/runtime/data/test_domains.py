"""Synthetic inputs fit what a model does with them: onnxruntime takes them, and uses all that it has for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from penstock.planning.model import from_onnx
from penstock.runtime.data.domains import Domain, domain_of
from penstock.runtime.data.samples import SyntheticSamples

HEAD = '<ir_version: 8, opset_import: ["" : 17]> m'


def written(folder: Path, text: str) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(f"{HEAD} {text}").SerializeToString())
    return path


def drawn(path: Path, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Draw microbatches of the input x, and return them with what onnxruntime makes of each."""
    samples, session = SyntheticSamples(from_onnx(path).module, 0), onnxruntime.InferenceSession(path)
    inputs = [samples.microbatch(mb, "x") for mb in range(count)]
    return np.stack(inputs), np.stack([session.run(None, {"x": x})[0] for x in inputs])


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8"])
def test_a_one_hot_gets_every_class(kind: str, tmp_path: Path) -> None:
    """Every row of the one-hot has its one, and no column is left out. Bytes reach 255 of 257 columns."""
    text = f"""({kind}[64] x) => (float[64, 257] y) <int64 depth = {{257}}, float[2] pair = {{0, 1}}>
        {{ wide = Cast<to=7>(x)  y = OneHot(wide, depth, pair) }}"""
    inputs, results = drawn(written(tmp_path, text))
    assert (results.sum(axis=-1) == 1).all()
    assert set(inputs.reshape(-1).tolist()) == set(range(256 if kind == "uint8" else 257))


def test_a_place_in_a_table_after_arithmetic(tmp_path: Path) -> None:
    """Two columns make one place, 3 * a + b + 1, of a table with 24 rows. onnxruntime refuses a place that is not there."""
    text = """(int64[8, 2] x) => (float[8] y) <int64[1] three = {3}, int64[1] one = {1}, int64[1] zero = {0}, int64[1] two = {2}>
        { table = Constant<value_floats = [0.0,1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0,9.0,10.0,11.0,12.0,13.0,14.0,15.0,16.0,17.0,18.0,19.0,20.0,21.0,22.0,23.0]>()
          axis = Constant<value_ints = [1]>()
          a = Slice(x, zero, one, axis)  b = Slice(x, one, two, axis)
          c = Mul(a, three)  d = Add(c, b)  e = Add(d, one)  f = Squeeze(e, axis)  y = Gather(table, f) }"""
    inputs, results = drawn(written(tmp_path, text))
    assert inputs.max() == 5  # 3 * 5 + 5 + 1 is 21, and 3 * 6 + 6 + 1 is 25, past the end
    assert results.max() == 21


@pytest.mark.parametrize(
    ("use", "low", "high"),
    [
        ("y = Log(x)", 0, None),
        ("y = Sqrt(x)", 0, None),
        ("half = Constant<value_float = 0.5>()  y = Pow(x, half)", 0, None),
        ("two = Constant<value_float = 2.0>()  t = Mul(x, two)  y = Log(t)", 0, None),
        ("one = Constant<value_float = 1.0>()  low = Constant<value_float = -10000.0>()  t = Sub(one, x)  y = Mul(t, low)", 0, 1),
        ("c = Cast<to=9>(x)  y = Cast<to=1>(c)", 0, 1),
        # Controls: these take any number.
        ("y = Tanh(x)", None, None),
        ("t = Mul(x, x)  y = Sqrt(t)", None, None),
        ("low = Constant<value_float = -10000.0>()  y = Mul(x, low)", None, None),
    ],
)  # fmt: skip
def test_floats_are_of_the_kind_that_is_asked_for(
    use: str, low: float | None, high: float | None, tmp_path: Path
) -> None:
    inputs, results = drawn(written(tmp_path, f"(float[32] x) => (float[32] y) {{ {use} }}"))
    assert np.isfinite(results).all()
    assert (inputs.min() >= 0) == (low is not None)
    assert (set(inputs.reshape(-1).tolist()) == {0, 1}) == (high is not None)


def test_bytes_without_a_use_are_bytes_and_masks_are_masks(tmp_path: Path) -> None:
    def domain(kind: str, use: str) -> Domain:
        path = written(tmp_path, f"({kind}[4] x) => (float[4] y) {{ {use} }}")
        return domain_of(from_onnx(path).module, "x")

    assert domain("uint8", "y = Cast<to=1>(x)") == Domain(0, 256)
    assert domain("int8", "y = Cast<to=1>(x)") == Domain(-128, 128)
    assert domain("uint8", "b = Cast<to=9>(x)  y = Cast<to=1>(b)") == Domain(0, 2)
    assert domain("int64", "y = Cast<to=1>(x)") == Domain(0, 2)
    assert domain("int64", "c = Constant<value_int = 7>()  e = Equal(x, c)  y = Cast<to=1>(e)") == Domain(0, 9)
    assert domain("float", "y = Neg(x)") == Domain()


def test_a_length_reaches_the_last_position(tmp_path: Path) -> None:
    text = (
        """(int64[6, 1] x) => (bool[6, 5] y) { line = Constant<value_ints = [0, 1, 2, 3, 4]>()  y = Less(line, x) }"""
    )
    inputs, results = drawn(written(tmp_path, text))
    assert set(results.sum(axis=-1).reshape(-1).tolist()) == set(range(6)) == set(inputs.reshape(-1).tolist())
