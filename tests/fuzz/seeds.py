"""The models that are damaged: small ones of every kind that files have, and some of ONNX's node tests.

Out: for each seed its files by name, `model.onnx` among them. Everything is made in code and the same in every run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import onnx
import onnx.parser
from conformance.cases import NUMERIC, collect, members
from onnx import TensorProto, numpy_helper

from penstock.models import write_bert, write_cnn, write_gpt, write_mlp

MODEL = "model.onnx"
Files = dict[str, bytes]
Seeds = tuple[tuple[str, Files], ...]

_HEADER = '<ir_version: 10, opset_import: ["" : 21, "local" : 1]>'
_TEXTS = {
    "if": """(float[2,3] x) => (float[2,3] y) {
        c = Constant<value = bool {1}>()
        y = If(c)<then_branch = a () => (float[2,3] t) { t = Relu(x) }, else_branch = b () => (float[2,3] e) { e = Neg(x) }> }""",
    "loop": """(float[2,3] x) => (float[2,3] y, float[4,2,3] s) {
        n = Constant<value_int = 4>() c = Constant<value = bool {1}>()
        y, s = Loop(n, c, x)<body = b (int64 i, bool on, float[2,3] h) => (bool go, float[2,3] k, float[2,3] o) {
            go = Identity(on) k = Add(h, x) o = Relu(k) }> }""",
    "scan": """(float[4,3] x, float[3] h0) => (float[3] h, float[4,3] s) {
        h, s = Scan<num_scan_inputs = 1, body = b (float[3] a, float[3] e) => (float[3] k, float[3] o) { k = Add(a, e) o = Tanh(k) }>(h0, x) }""",
    "shapes": """(float[2,3,4] x) => (float[2,12] y, float[4,3] z) {
        s = Shape(x) zero = Constant<value = int64[1] {0}>() first = Gather(s, zero) rest = Constant<value = int64[1] {-1}>()
        to = Concat<axis = 0>(first, rest) y = Reshape(x, to)
        n = Constant<value = int64[2] {4, 3}>() one = ConstantOfShape<value = float[1] {1.5}>(n) r = Constant<value = int64[2] {1, 1}>()
        t = Tile(one, r) b = Constant<value = int64[2] {4, 3}>() z = Expand(t, b) }""",
    "indices": """(float[4,6] x) => (float[2,3] y, float[4,8] p, int64[4,2] k, float[3] w) {
        a = Constant<value = int64[2] {0, 1}>() e = Constant<value = int64[2] {2, 7}>() d = Constant<value = int64[2] {1, 2}>()
        ax = Constant<value = int64[2] {0, 1}>() y = Slice(x, a, e, ax, d)
        g = Constant<value = int64[4] {0, 1, 0, 1}>() p = Pad(x, g) two = Constant<value = int64[1] {2}>() v, k = TopK(x, two)
        f = Constant<value_float = 0.0>() l = Constant<value_float = 3.0>() st = Constant<value_float = 1.0>() w = Range(f, l, st) }""",
    "quantised": """(float[2,3] x, float[2,4] z) => (float[2,4] y) {
        s = Constant<value_float = 0.1>() o = Constant<value = uint8 {128}>() q = QuantizeLinear(x, s, o) d = DequantizeLinear(q, s, o)
        w = Constant<value = float[3,4] {1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12.}>() m = MatMul(d, w) y = Add(m, z) }""",
    "cast": """(float[2,3] x, int64[3] i) => (float16[2,3] y, double[2,3] z, bool[2,3] b) {
        f = Cast<to = 1>(i) a = Mul(x, f) y = Cast<to = 10>(a) z = Cast<to = 11>(a) b = Greater(x, f) }""",
    "einsum": """(float[2,3,4] x, float[2,4,5] w) => (float[2,3,5] y, float[2,5,3] t) {
        y = Einsum<equation = "bij,bjk->bik">(x, w) t = Transpose<perm = [0, 2, 1]>(y) }""",
}
_FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
calls (float[2,3] x) => (float[2,3] y) { h = local.twice(x) y = local.gate<alpha = 0.3>(h) }
<domain: "local", opset_import: ["" : 21]> twice (a) => (b) { b = Add(a, a) }
<domain: "local", opset_import: ["" : 21]> gate <alpha> (a) => (b) { r = LeakyRelu<alpha: float = @alpha>(a) b = Sigmoid(r) }
"""


@lru_cache(maxsize=1)
def seeds() -> Seeds:
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        path = Path(folder) / MODEL
        writers: dict[str, Callable[[], object]] = {
            "mlp": lambda: write_mlp(path, [3, 4, 2], 2),
            "gpt": lambda: write_gpt(path, layers=1, width=8, heads=2, vocab=11, positions=4, batch=2),
            "bert": lambda: write_bert(path, layers=1, width=8, heads=2, vocab=11, positions=4, batch=2),
            "cnn": lambda: write_cnn(path, 2, channels=(1, 2, 4), size=8),
        }
        found: list[tuple[str, Files]] = []
        for name, write in writers.items():
            write()
            found.append((name, {MODEL: path.read_bytes()}))
    found += [(name, {MODEL: _parsed(f"{_HEADER} {name} {text}")}) for name, text in _TEXTS.items()]
    found += [("functions", {MODEL: _parsed(_FUNCTION)}), ("external", external())]
    numeric = [case for case in collect() if NUMERIC in members(case) and len(case.model.SerializeToString()) < 20_000]
    found += [(case.name, {MODEL: case.model.SerializeToString()}) for case in numeric[::12]]
    return tuple(found)


def write_seeds(path: Path) -> None:
    """For another process, so that it need not make them: ONNX's node tests take seconds."""
    with ZipFile(path, "w") as archive:
        for number, (name, files) in enumerate(seeds()):
            for relative, content in files.items():
                archive.writestr(f"{number}/{name}/{relative}", content)


def read_seeds(path: Path) -> Seeds:
    found: dict[str, dict[str, Files]] = {}
    with ZipFile(path) as archive:
        for entry in archive.namelist():
            number, name, relative = entry.split("/", 2)
            found.setdefault(number, {}).setdefault(name, {})[relative] = archive.read(entry)
    return tuple(item for seed in found.values() for item in seed.items())


def external() -> Files:
    """A product and a sum whose weights lie in two files."""
    weight, bias = np.arange(600, dtype=np.float32).reshape(20, 30), np.ones(30, np.float32)
    model = onnx.parser.parse_model(
        f"{_HEADER} external (float[2,20] x) => (float[2,30] y) {{ h = MatMul(x, w) y = Add(h, b) }}"
    )
    for name, array, location, offset in (("w", weight, "data.bin", 64), ("b", bias, "more/bias.bin", 0)):
        tensor = TensorProto(
            name=name, data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL
        )
        for key, value in {"location": location, "offset": offset, "length": array.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
        model.graph.initializer.append(tensor)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "unused"))
    return {MODEL: model.SerializeToString(), "data.bin": bytes(64) + weight.tobytes(), "more/bias.bin": bias.tobytes()}


def _parsed(text: str) -> bytes:
    content: bytes = onnx.parser.parse_model(text).SerializeToString()
    return content
