"""One plan of layouts from four sources: a file, styles of torch, tuples as jax writes them, and the model's own device
configuration. It gives one module.ir, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import penstock as ps
from penstock.models import write_mlp

HEADS, EACH, TOKENS, BATCH = 4, 3, 6, 2
WIDTH = HEADS * EACH


def write_block(path: Path) -> Path:
    """Write a block of a decoder: attention with three products and one behind it, and two products with gelu."""
    rng = np.random.default_rng(0)
    sizes = {
        "q": (WIDTH, WIDTH),
        "k": (WIDTH, WIDTH),
        "v": (WIDTH, WIDTH),
        "o": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
    }
    sizes |= {"down": (4 * WIDTH, WIDTH)}
    arrays = {f"{name}.weight": rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    arrays |= {f"{name}.bias": rng.normal(size=size[1:]).astype(np.float32) for name, size in sizes.items()}
    arrays |= {
        f"norm{i}.{part}": rng.normal(size=[WIDTH]).astype(np.float32) for i in "12" for part in ("weight", "bias")
    }
    shapes = {
        "split": [BATCH, TOKENS, HEADS, EACH],
        "merged": [BATCH, TOKENS, WIDTH],
        "scale": None,
    }
    constants = [
        numpy_helper.from_array(np.array(shape, np.int64) if shape else np.float32(EACH**-0.5), name)
        for name, shape in shapes.items()
    ]
    nodes = []

    def add(kind: str, ins: str, out: str, **attributes: object) -> None:
        nodes.append(helper.make_node(kind, ins.split(), [out], name=out, **attributes))

    def linear(x: str, name: str) -> None:
        add("MatMul", f"{x} {name}.weight", f"{name}.product")
        add("Add", f"{name}.product {name}.bias", name)

    add("LayerNormalization", "x norm1.weight norm1.bias", "normed1")
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        linear("normed1", name)
        add("Reshape", f"{name} split", f"{name}.split")
        add("Transpose", f"{name}.split", f"{name}.heads", perm=order)
    add("MatMul", "q.heads k.heads", "scores")
    add("Mul", "scores scale", "scaled")
    add("Softmax", "scaled", "chances")
    add("MatMul", "chances v.heads", "mixed")
    add("Transpose", "mixed", "turned", perm=[0, 2, 1, 3])
    add("Reshape", "turned merged", "attended")
    linear("attended", "o")
    add("Add", "x o", "stream")
    add("LayerNormalization", "stream norm2.weight norm2.bias", "normed2")
    linear("normed2", "up")
    add("Gelu", "up", "active")
    linear("active", "down")
    add("Add", "stream down", "y")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, TOKENS, WIDTH]) for name in "xy"]
    initializers = [*(numpy_helper.from_array(array, name) for name, array in arrays.items()), *constants]
    graph = helper.make_graph(nodes, "block", values[:1], values[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


COLUMNS = {"mlp": ["fc1", "fc3"], "block": ["q", "k", "v", "up"]}
ROWS = {"mlp": ["fc2", "y"], "block": ["o", "down"]}


@pytest.fixture(scope="module", params=["mlp", "block"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.onnx"
    return write_mlp(path, [8, 16, 12, 16, 4], 4) if request.param == "mlp" else write_block(path)


def dims_of(name: str) -> dict[str, int]:
    """Return the dimension of each bias and weight that is split; of the biases of rows none is."""
    columns, rows = COLUMNS[name], ROWS[name]
    dims = {f"{x}.weight": 1 for x in columns} | {f"{x}.bias": 0 for x in columns} | {f"{x}.weight": 0 for x in rows}
    return dims | {f"{x}.bias": -1 for x in rows}


def annotated(source: Path, folder: Path, dims: Mapping[str, int], devices: int) -> Path:
    """Write the model with a configuration that says the shards of some of its initializers."""
    model = onnx.load(source)
    model.ir_version = 11
    model.configuration.append(onnx.DeviceConfigurationProto(name="pair", num_devices=devices))
    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    for node in model.graph.node:
        specs = [onnx.ShardingSpecProto(tensor_name=x, device=range(devices)) for x in node.input if x in dims]
        for spec in specs:
            if (dim := dims[spec.tensor_name]) >= 0:
                part = onnx.SimpleShardedDimProto(num_shards=devices)
                spec.sharded_dim.append(
                    onnx.ShardedDimProto(axis=dim - ranks[spec.tensor_name], simple_sharding=[part])
                )
        if specs:
            entry = onnx.NodeDeviceConfigurationProto(configuration_id="pair", sharding_spec=specs)
            node.device_configurations.append(entry)
    onnx.checker.check_model(model)
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / source.name)
    return folder / source.name


def module_file(path: Path, out: Path, **options: object) -> bytes:
    """Compile for training on two devices, and return the bundle's module.ir."""
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=2)
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(2), training, stages=1, **options)
    ps.compile(plan, out, backend="numpy")
    return (out / "module.ir").read_bytes()


def test_four_sources_give_one_program(source: Path, tmp_path: Path) -> None:
    name = source.stem
    dims = dims_of(name)
    ranks = {key: 1 if key.endswith("bias") else 2 for key in dims}
    file = tmp_path / "layouts.toml"
    tuples = {key: tuple("tp" if i == dim else None for i in range(ranks[key])) for key, dim in dims.items()}
    lines = [f'"{key}" = "[{",".join("/tp" if axis else "_" for axis in spec)}]"' for key, spec in tuples.items()]
    file.write_text("[layouts]\n" + "\n".join(lines) + "\n")
    styles = {x: ColwiseParallel() for x in COLUMNS[name]} | {x: RowwiseParallel() for x in ROWS[name]}
    modules = [
        module_file(source, tmp_path / f"bundle{i}", mesh="tp=2", shard=shard)
        for i, shard in enumerate((str(file), styles, tuples))
    ]
    modules.append(module_file(annotated(source, tmp_path / "laid", dims, 2), tmp_path / "bundle3"))
    assert b"/tp]" in modules[0]
    assert b"all_reduce" in modules[0]
    assert len(set(modules)) == 1
    # The control: with rows and columns of one pair exchanged, it is another program, from every source.
    last, first = ROWS[name][-1], COLUMNS[name][-1]
    turned = {**dims, f"{first}.weight": 0, f"{last}.weight": 1, f"{first}.bias": -1, f"{last}.bias": 0}
    other = module_file(annotated(source, tmp_path / "other", turned, 2), tmp_path / "bundle4")
    swapped = {**styles, first: RowwiseParallel(), last: ColwiseParallel()}
    assert module_file(source, tmp_path / "bundle5", mesh="tp=2", shard=swapped) == other != modules[0]
