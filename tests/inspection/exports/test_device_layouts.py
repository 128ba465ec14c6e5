"""Tests of layouts in exported ONNX models: planned without any settings, the export gives the program that it came
from. ONNX's checker and onnxruntime take it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.text import print_module
from penstock.models import write_gpt, write_mlp

TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=2)
# Blocks, uneven parts of the hidden units, and axes in both orders.
QKV = ["h.*.qkv.weight=[_,3*/tp]", "h.*.attn.proj.weight=[/tp,_]"]
PLANE = ["h.*.fc.weight=[_,/b/a]", "h.*.mlp.proj.weight=[/b/a,_]", "tokens=[/a,_]"]
HIDDEN = ["fc1.weight=[_,/tp]", "fc2.weight=[/tp,_]"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "mlp": write_mlp(folder / "mlp.onnx", [8, 10, 6, 4], 4),
        "gpt": write_gpt(folder / "gpt.onnx", layers=2, width=24, heads=6, vocab=38, positions=8, batch=4),
    }


def exported(plan: ps.Plan, folder: Path, name: str) -> Path:
    """Export a plan into a file of the model's name, which names the module."""
    bundle = ps.compile(plan, folder / "bundle", backend="numpy")
    (folder / "out").mkdir()
    ps.export(bundle, onnx=folder / "out" / name)
    return folder / "out" / name


def program(plan: ps.Plan) -> str:
    """Return the program without notes, which say where layouts are from."""
    return print_module(plan.module.but(notes=()))


@pytest.mark.parametrize(
    ("name", "devices", "mesh", "shard", "stages"),
    [
        ("mlp", 4, "tp=4", HIDDEN, 1),
        ("mlp", 4, "dp=2,tp=2", HIDDEN, 1),
        ("gpt", 2, "tp=2", QKV, 1),
        ("gpt", 4, "a=2,b=2", PLANE, 1),
        ("gpt", 6, "tp=3", "preset:sequence", 2),
    ],
)
def test_an_export_planned_anew_is_the_same_program(models, tmp_path, name, devices, mesh, shard, stages):
    source = models[name]
    plan = ps.plan(ps.from_onnx(source), ps.Cluster.local(devices), TRAINING, stages=stages, mesh=mesh, shard=shard)
    path = exported(plan, tmp_path, source.name)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    (configuration,) = model.configuration
    assert (configuration.name, configuration.num_devices, model.ir_version) == (mesh, devices, 11)
    again = ps.plan(ps.from_onnx(path), ps.Cluster.local(devices), TRAINING)
    assert program(again) == program(plan)
    # The control: where one shard is said otherwise, it is another program.
    spec = next(s for n in model.graph.node for e in n.device_configurations for s in e.sharding_spec if s.sharded_dim)
    others = [s for n in model.graph.node for e in n.device_configurations for s in e.sharding_spec]
    for each in others:
        if each.tensor_name == spec.tensor_name:
            each.CopyFrom(whole(spec, devices // stages))
    onnx.save(model, path)
    assert program(ps.plan(ps.from_onnx(path), ps.Cluster.local(devices), TRAINING)) != program(plan)


def whole(spec: onnx.ShardingSpecProto, devices: int) -> onnx.ShardingSpecProto:
    entry = onnx.IntIntListEntryProto(key=-1, value=range(devices))
    return onnx.ShardingSpecProto(tensor_name=spec.tensor_name, device=[-1], index_to_device_group_map=[entry])


def test_other_runtimes_compute_the_same(models, tmp_path):
    plan = ps.plan(ps.from_onnx(models["mlp"]), ps.Cluster.local(2), mesh="tp=2", shard=HIDDEN)
    path = exported(plan, tmp_path, "mlp.onnx")
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    results = [
        onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for file in (models["mlp"], path)
    ]
    np.testing.assert_array_equal(*results)


def test_the_command_needs_no_flags_for_it(models, tmp_path, capsys):
    flags = ["--loss", "cross_entropy", "--optimizer", "sgd", "--lr", "0.1", "--microbatches", "2"]
    plan = ps.plan(ps.from_onnx(models["mlp"]), ps.Cluster.local(4), TRAINING, stages=1, mesh="dp=2,tp=2", shard=HIDDEN)
    path = exported(plan, tmp_path, "mlp.onnx")
    assert main(["plan", str(path), *flags]) == 0
    said = capsys.readouterr()
    assert "mesh dp=2, tp=2: " in said.out
    assert "configuration 'dp=2,tp=2' of the model lays 15 tensors out over 4 devices" in said.err
    # What is asked for goes before: a note says what is not followed.
    assert main(["plan", str(path), *flags, "--replicas", "2"]) == 0
    assert "are not followed: it is for 4 devices of a stage, 2 replicas are asked for" in capsys.readouterr().out
    assert main(["plan", str(path), *flags, "--hints", "ignore"]) == 0
    assert "mesh " not in capsys.readouterr().out


@pytest.mark.parametrize("options", [{}, {"mesh": "dp=2"}, {"replicas": 2}])
def test_what_is_not_split_is_exported_as_it_was(models, tmp_path, options):
    plan = ps.plan(ps.from_onnx(models["mlp"]), ps.Cluster.local(2), TRAINING, **options)
    assert exported(plan, tmp_path, "mlp.onnx").read_bytes() == models["mlp"].read_bytes()


def test_blocks_are_factors_of_their_dimension(models, tmp_path):
    plan = ps.plan(ps.from_onnx(models["gpt"]), ps.Cluster.local(2), TRAINING, stages=1, mesh="tp=2", shard=QKV)
    model = onnx.load(exported(plan, tmp_path, "gpt.onnx"))
    specs = {s.tensor_name: s for n in model.graph.node for e in n.device_configurations for s in e.sharding_spec}
    ((dim,), devices) = specs["h.0.attn.qkv.weight"].sharded_dim, specs["h.0.attn.qkv.weight"].device
    assert [(part.dim_value, part.num_shards) for part in dim.simple_sharding] == [(3, 1), (24, 2)]
    assert (dim.axis, list(devices)) == (1, [0, 1])
