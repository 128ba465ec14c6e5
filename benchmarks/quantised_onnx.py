"""Feed-forward layers as BERT has them, quantised by onnxruntime's `quantize_dynamic`, beside onnxruntime.

    python benchmarks/quantised_onnx.py                       rows 1, 16 and 128, in float32 and in bytes: two minutes
    python benchmarks/quantised_onnx.py --rows 8 --width 64   other sizes

It writes the models, and beside_onnxruntime.py measures them: a call of each in turn, medians, one thread and two.
Other options go on to that program. The models of float32 are there for comparison.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

HERE = Path(__file__).resolve().parent
# A gelu between two products, each with a bias, and the sum with the input.
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
layer (float[{rows},{width}] x) => (float[{rows},{width}] y) <float half = {{0.5}}, float one = {{1.0}}, float root = {{1.4142135}}> {{
    a = MatMul(x, up)
    b = Add(a, up_bias)
    c = Div(b, root)
    d = Erf(c)
    e = Add(d, one)
    f = Mul(b, e)
    g = Mul(f, half)
    h = MatMul(g, down)
    i = Add(h, down_bias)
    y = Add(i, x)
}}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 128], help="rows of the input")
    parser.add_argument("--width", type=int, default=768, help="columns of the input; a quarter of those inside")
    arguments, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        write_models(Path(folder), arguments.rows, arguments.width)
        words = [str(HERE / "beside_onnxruntime.py"), "--models", folder, *rest]
        return subprocess.run([sys.executable, *words], check=False).returncode


def write_models(folder: Path, rows: Sequence[int], width: int, *, per_channel: bool = True) -> list[Path]:
    """Write a layer for each number of rows, in float32 and with bytes; return the files of bytes."""
    paths = []
    for count in rows:
        plain, path = folder / f"floats-{count:03}.onnx", folder / f"bytes-{count:03}.onnx"
        onnx.save(_layer(count, width), plain)
        quantize_dynamic(plain, path, per_channel=per_channel, weight_type=QuantType.QInt8)
        paths.append(path)
    return paths


def _layer(rows: int, width: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT.format(rows=rows, width=width))
    random = np.random.default_rng(1)
    shapes = {"up": (width, 4 * width), "up_bias": (4 * width,), "down": (4 * width, width), "down_bias": (width,)}
    for name, dims in shapes.items():
        array = (random.standard_normal(dims) / np.sqrt(dims[0])).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


if __name__ == "__main__":
    sys.exit(main())
