"""Models that onnxruntime quantised to bytes, beside onnxruntime.

    python benchmarks/quantised_onnx.py                       layers of 1, 16 and 128 rows as BERT has: two minutes
    python benchmarks/quantised_onnx.py --rows 8 --width 64   other sizes
    python benchmarks/quantised_onnx.py --exporter PYTHON     ResNet-50 and BERT-base: ten minutes

Layers are quantised by `quantize_dynamic`, and stand beside those in float32. ResNet-50 and BERT-base, with random
weights, are quantised by `quantize_static` in QDQ form, with two drawn inputs for the ranges, and by
`quantize_dynamic`. PYTHON is the one that export_models.py runs in. Other options go on to beside_onnxruntime.py, which
measures: a call of each in turn, medians, one thread and two. Deep networks of random weights let a step of
quantisation grow, so outputs of whole models may differ by more than those of layers.
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
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

HERE = Path(__file__).resolve().parent
TOLERANCE = "0.1"
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
    parser.add_argument("--exporter", metavar="PYTHON", help="measure whole models, which this Python makes")
    arguments, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        if arguments.exporter:
            (Path(folder) / "floats").mkdir()
            command = [arguments.exporter, str(HERE / "export_models.py"), f"{folder}/floats"]
            subprocess.run([*command, "--list", str(HERE / "quantised.toml")], check=True, stdout=sys.stderr)
            for path in sorted(Path(folder).glob("floats/*.onnx")):
                quantise_model(path, Path(folder))
            others = ["--tolerance", TOLERANCE, *others]
        else:
            write_models(Path(folder), arguments.rows, arguments.width)
        words = [str(HERE / "beside_onnxruntime.py"), "--models", folder, *others]
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


class DrawnInputs(CalibrationDataReader):
    """Two drawn inputs of a model, from which ranges of its tensors are taken."""

    def __init__(self, path: Path) -> None:
        random, self.feeds = np.random.default_rng(0), list[dict[str, np.ndarray]]()
        for _ in range(2):
            feed = {}
            for value in onnx.load(path, load_external_data=False).graph.input:
                dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
                whole = value.type.tensor_type.elem_type == onnx.TensorProto.INT64
                drawn = random.integers(0, 2000, dims) if whole else random.standard_normal(dims)
                feed[value.name] = drawn if whole else drawn.astype(np.float32)
            self.feeds.append(feed)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.feeds.pop() if self.feeds else None


def quantise_model(path: Path, folder: Path) -> list[Path]:
    """Quantise a model of floats, statically in QDQ form and dynamically; return the files."""
    ready = path.with_suffix(".ready")
    static, dynamic = folder / f"{path.stem}-static.onnx", folder / f"{path.stem}-dynamic.onnx"
    quant_pre_process(path, ready, skip_symbolic_shape=True)
    how = {"per_channel": True, "weight_type": QuantType.QInt8}
    # Activations without sign: with one, onnxruntime is slower on these processors.
    unsigned = {"activation_type": QuantType.QUInt8, "quant_format": QuantFormat.QDQ}
    quantize_static(ready, static, DrawnInputs(ready), **unsigned, **how)
    # Shapes of weights that quantising transposes would contradict those written down.
    model = onnx.load(ready)
    del model.graph.value_info[:]
    onnx.save(model, ready)
    quantize_dynamic(ready, dynamic, **how)
    return [static, dynamic]


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
