"""Placement hints of a model: kept by the importer, followed by the plan where they fit, and refused with a reason where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import penstock as ps
from penstock.commands import parser as cli
from penstock.frontends.onnx import import_onnx
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.interpreter.store import DictStore
from penstock.ir.text import parse_module, print_module
from penstock.models import write_gpt, write_mlp
from penstock.passes.partition.chain import chain_of

# In the order of the file: four layers of MatMul, Add and, but for the last, Relu.
MLP = [f"{layer}{part}" for layer in ("fc1", "fc2", "fc3", "y") for part in (".product", "")]


def annotate(
    path: Path,
    stages: Mapping[str, Callable[[str], int | None]] | None = None,
    layer: Callable[[str], str] | None = None,
    ir: int = 11,
) -> Path:
    """Write a stage for each node and configuration, and a layer."""
    model = onnx.load(path)
    model.ir_version = ir
    for name in stages or {}:
        model.configuration.append(onnx.DeviceConfigurationProto(name=name, num_devices=2))
    for node in model.graph.node:
        for name, stage_of in (stages or {}).items():
            stage = stage_of(node.name)
            if stage is not None:
                node.device_configurations.append(
                    onnx.NodeDeviceConfigurationProto(configuration_id=name, pipeline_stage=stage)
                )
        if layer is not None and layer(node.name):
            node.metadata_props.append(onnx.StringStringEntryProto(key="layer_ann", value=layer(node.name)))
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


@pytest.fixture
def mlp(tmp_path) -> Path:
    return write_mlp(tmp_path / "model.onnx", [8, 64, 64, 64, 4], 4)


def planned(path: Path, devices: int, **options: object) -> ps.Plan:
    training = ps.Training(loss="cross_entropy", microbatches=2) if options.pop("trains", True) else None
    return ps.plan(ps.from_onnx(path), ps.Cluster.local(devices), training, **options)


def stage_of_params(plan: ps.Plan) -> dict[str, int | None]:
    return {name: var.stage for name, var in plan.module.vars.items() if var.role == "param"}


def notes(plan: ps.Plan) -> list[str]:
    return [note.text for note in plan.module.notes if note.origin == "placement"]


def cut_after(*last: str) -> Callable[[str], int]:
    """The stage of a node of the MLP, when each of `last` is the last of its stage. Relu nodes go with what they follow."""
    order = [
        name
        for layer in ("1", "2", "3", "")
        for name in ((f"fc{layer}.product", f"fc{layer}", f"relu{layer}") if layer else ("y.product", "y"))
    ]
    return lambda name: sum(order.index(name) > order.index(end) for end in last)


@pytest.mark.parametrize("trains", [True, False])
def test_stages_are_where_the_model_says(mlp, trains):
    """At a place that the search would not choose: that is the control."""
    searched = stage_of_params(planned(mlp, 2, trains=trains))
    annotate(mlp, {"two": cut_after("relu1")})
    plan = planned(mlp, 2, trains=trains)
    expected = {name: 0 if name.startswith("fc1") else 1 for name in searched}
    assert stage_of_params(plan) == expected != searched
    assert notes(plan) == ["stages are those of configuration 'two' of the model"]
    assert "partition{split_at=[fc2.product]," in plan.as_dict()["pipeline"]
    assert parse_module(print_module(plan.module)) == plan.module
    ignored = planned(mlp, 2, trains=trains, hints=False)
    assert stage_of_params(ignored) == searched
    assert notes(ignored) == []


def test_the_configuration_with_as_many_stages_is_taken(mlp):
    annotate(mlp, {"three": cut_after("relu1", "fc2"), "two": cut_after("fc3")})
    plan = planned(mlp, 2)
    assert notes(plan) == [
        "the pipeline stages of configuration 'three' of the model are not followed: it has 3 stages, 2 are asked for",
        "stages are those of configuration 'two' of the model",
    ]
    assert {name for name, stage in stage_of_params(plan).items() if stage == 1} == {"y.weight", "y.bias"}
    plan = planned(mlp, 3)
    assert notes(plan) == ["stages are those of configuration 'three' of the model"]
    assert [stage_of_params(plan)[name] for name in ("fc1.weight", "fc2.bias", "fc3.weight", "y.bias")] == [0, 1, 2, 2]
    assert planned(mlp, 4).as_dict()["stages"][3]["stage"] == 3
    assert notes(planned(mlp, 1)) == []


def test_stage_numbers_need_not_begin_at_zero_and_nodes_may_have_none(mlp):
    cut = cut_after("relu2")
    annotate(mlp, {"two": lambda name: 3 + 4 * cut(name) if name.endswith("product") else None})
    plan = planned(mlp, 2)
    assert notes(plan) == ["stages are those of configuration 'two' of the model"]
    assert [stage_of_params(plan)[f"{name}.weight"] for name in ("fc1", "fc2", "fc3", "y")] == [0, 0, 1, 1]


def test_stages_out_of_order_are_not_followed(mlp):
    searched = stage_of_params(planned(mlp, 2))
    annotate(mlp, {"mixed": lambda name: int(name.startswith("fc2"))})
    plan = planned(mlp, 2)
    (note,) = notes(plan)
    assert note.endswith("not contiguous in the order of the model, fc2 of stage 1 stands before relu2 of stage 0")
    assert stage_of_params(plan) == searched


def test_stages_that_part_a_shared_parameter_are_followed(tmp_path):
    text = "(float[4,8] x) => (float[4,8] y) { a = MatMul(x, w) b = Tanh(a) c = MatMul(b, w) y = Tanh(c) }"
    model = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["" : 20]> tied {text}')
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    for i, node in enumerate(model.graph.node):
        node.name = f"n{i}"
    onnx.save(model, tmp_path / "model.onnx")
    annotate(tmp_path / "model.onnx", {"two": lambda name: int(name > "n1")})
    plan = planned(tmp_path / "model.onnx", 2)
    assert notes(plan) == ["stages are those of configuration 'two' of the model"]
    assert any("@w is read on stages 0, 1" in note.text for note in plan.module.notes)


def test_the_user_goes_before_the_model(mlp):
    annotate(mlp, {"two": cut_after("relu1")})
    plan = planned(mlp, 2, split_at=("fc3.product",))
    assert stage_of_params(plan)["fc2.weight"] == 0
    assert notes(plan) == ["the pipeline stages of the model are not followed: --split-at says where stages start"]
    (note,) = notes(planned(mlp, 2, split_by="module", pin=("fc1=0",)))
    assert note.endswith("are not followed: --split-by and --pin say where stages start")
    # Where nothing of stages is asked for, or of one stage, there is nothing to say.
    assert not notes(planned(mlp, 1, pin=("fc1=0",)))
    assert not notes(planned(mlp, 2, pin=("fc1=0",), hints=False))


def test_stages_start_between_layers(tmp_path):
    path = write_gpt(tmp_path / "model.onnx", layers=3, width=256, heads=4, vocab=256, positions=64, batch=1)
    searched = planned(path, 2)

    def block(name: str) -> str:
        return name[:3] if name.startswith("h.") else ""

    annotate(path, layer=block)
    plan = planned(path, 2)
    assert notes(plan) == ["stages start between layers of the model, at one of 2 places"]
    stages = stage_of_params(plan)
    assert all(len({stage for name, stage in stages.items() if name.startswith(f"h.{i}.")}) == 1 for i in range(3))
    # The control: without the hint, a block is cut in two.
    stages = stage_of_params(searched)
    assert any(len({stage for name, stage in stages.items() if name.startswith(f"h.{i}.")}) == 2 for i in range(3))
    assert notes(planned(path, 4)) == [
        "the layers of the model are not followed: 4 stages need 3 places between them, there are 2"
    ]


def test_a_hinted_plan_trains_like_any_other(mlp, tmp_path):
    annotate(mlp, {"two": cut_after("relu1")})
    bundle = ps.compile(planned(mlp, 2), tmp_path / "bundle", backend="numpy")
    assert cli.main(["verify", str(bundle), "--steps", "2"]) == 0
    ps.export(bundle, onnx=tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == mlp.read_bytes()


def test_hints_change_nothing_of_the_import(mlp):
    before = import_onnx(mlp)
    annotate(mlp, {"two": cut_after("relu1")}, lambda name: name[:3])
    after = import_onnx(mlp)
    assert after.module == before.module
    assert after.report[-2:] == (
        "configuration 'two' of the model places 11 nodes in 2 pipeline stages",
        "11 nodes are annotated with 6 layers",
    )
    x = np.ones((4, 8), np.float32)
    for found, want in zip(
        *(run_graph(i.module.graphs["main"], {"x": x}, DictStore(i.weights)) for i in (before, after)), strict=True
    ):
        np.testing.assert_array_equal(found, want)


def test_what_is_inside_a_function_goes_with_its_call(tmp_path):
    inner = helper.make_function(
        "mine", "Layer", ["a", "w"], ["b"], [helper.make_node("MatMul", ["a", "w"], ["p"]), helper.make_node("Tanh", ["p"], ["b"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    names = [f"h{i}" for i in range(4)]
    nodes = [
        helper.make_node("Layer", [before, f"w{i}"], [name], name=f"call{i}", domain="mine")
        for i, (before, name) in enumerate(zip(["x", *names], names, strict=False))
    ]
    shape = [4, 8]
    graph = helper.make_graph(
        nodes,
        "calls",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("h3", onnx.TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32) + i, f"w{i}") for i in range(4)],
    )
    model = helper.make_model(
        graph,
        functions=[inner],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)],
        ir_version=11,
    )
    onnx.save(model, tmp_path / "model.onnx")
    annotate(tmp_path / "model.onnx", {"two": lambda name: int(name == "call3")})
    plan = planned(tmp_path / "model.onnx", 2)
    assert notes(plan) == ["stages are those of configuration 'two' of the model"]
    assert stage_of_params(plan) == {"w0": 0, "w1": 0, "w2": 0, "w3": 1}


def test_the_command_says_what_it_did(mlp, capsys):
    annotate(mlp, {"two": cut_after("relu1")})
    assert cli.main(["plan", str(mlp), "--devices", "2"]) == 0
    said = capsys.readouterr()
    assert "configuration 'two' of the model places 11 nodes in 2 pipeline stages" in said.err
    assert "placement: stages are those of configuration 'two' of the model" in said.out
    assert cli.main(["plan", str(mlp), "--devices", "2", "--hints", "ignore"]) == 0
    assert "placement:" not in capsys.readouterr().out


def test_wherever_a_stage_may_start_training_is_the_same(tmp_path):
    """At every place in turn, also where the backward pass makes values again from what the next stage made of them (reshaped attention)."""
    path = write_gpt(tmp_path / "model.onnx", layers=1, width=8, heads=2, vocab=16, positions=8, batch=1)
    model, training = ps.from_onnx(path), ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.5), microbatches=2)
    whole = ps.plan(model, ps.Cluster.local(1), training)
    random = np.random.default_rng(0)
    drawn = [{name: random.integers(0, 16, (2, 8)) for name in ("tokens", "labels")} for _ in range(2)]
    weights = model.imported.weights

    def trained(plan: ps.Plan) -> dict[str, np.ndarray]:
        return {
            name: array
            for name, array in run_schedule(plan.module, weights, drawn).variables.items()
            if name in weights
        }

    expected = trained(whole)
    starts = [op.outs[0].name for op in chain_of(whole.reference)[1:]]
    assert {"h.0.attn.turned", "h.0.attn.merged"} <= set(starts)
    for start in starts:
        found = trained(ps.plan(model, ps.Cluster.local(2), training, split_at=(start,)))
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-14, err_msg=f"{name}, cut at {start}")
    assert any(np.abs(expected[name] - weights[name]).max() > 1e-3 for name in expected)
