"""Tests of `inspect --sharding`: bytes of tensors are those of arrays cut into tiles, bytes of collectives those of
sums that are counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.inspection.report.facts import gather
from penstock.inspection.report.reading import read_material
from penstock.inspection.sharding.layouts import INPUT, split_facts
from penstock.inspection.subject import open_subject
from penstock.inspection.views.sharding import show_sharding
from penstock.ir.sharding.tiles import cut
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import numpy_dtype
from penstock.models import write_mlp
from penstock.support.errors import UsageError
from penstock.support.terminal import terminal_width

ROWS, WIDTH, HIDDEN, TP, MICROBATCHES = 4, 8, 34, 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    write_mlp(folder / "mlp.onnx", [16, HIDDEN, WIDTH, HIDDEN, WIDTH])
    return folder


@pytest.fixture(scope="module")
def module(folder):
    """Two pairs of split products, on two teams of two."""
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=MICROBATCHES)
    plan = ps.plan(
        ps.from_onnx(folder / "mlp.onnx", dims={"batch": ROWS}),
        ps.Cluster.local(4),
        training,
        stages=1,
        mesh=f"dp=2,tp={TP}",
        shard="preset:megatron",
    )
    return plan.module


def test_bytes_of_tensors_are_those_of_their_arrays(module):
    mesh = module.mesh_of(0)
    types = {var.name: var.type for var in module.vars.values()} | {v.name: v.type for v in module.inputs}
    facts = split_facts(module)
    assert {t.name for t in facts.tensors} == types.keys()
    assert {t.name for t in facts.tensors if t.role == INPUT} == {"x", "labels"}
    for t in facts.tensors:
        array = np.zeros(types[t.name].dims, numpy_dtype(types[t.name].dtype))
        parts = [cut(array, types[t.name], mesh, place) for place in range(len(mesh.devices))]
        assert t.device_bytes == max(part.nbytes for part in parts)
        assert (t.whole_bytes, t.copies) == (array.nbytes, sum(part.nbytes for part in parts))
    # The control: some tensors are split, and not all.
    split = {t.name for t in facts.tensors if t.device_bytes < t.whole_bytes}
    assert {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.weight.grad"} <= split
    assert split.isdisjoint({"fc2.bias", "x", "lr"})


def test_bytes_of_collectives_are_those_counted_by_hand(module):
    facts = split_facts(module)
    # Each pair adds its result up in the forward; the second one adds up the gradient of what it takes.
    assert [(use.graph, use.kind, use.over, use.members) for use in facts.collectives] == [
        (graph, "all_reduce", ("tp",), TP) for graph in ("s0.F", "s0.F", "s0.B")
    ]
    one = ROWS * WIDTH * 4 * (TP - 1)
    assert [use.sent for use in facts.collectives] == [one] * 3
    # The gradient is added up behind the relu, through which sums pass in the backward.
    assert [use.behind.split()[0] for use in facts.collectives] == ["matmul", "matmul", "relu_grad"]
    assert [use.reader.split()[0] for use in facts.collectives[:2]] == ["add", "add"]
    # Of three microbatches one team runs two.
    assert [(g.graph, g.sent, g.batch, g.ranks) for g in facts.graphs] == [
        (name, count * one, 2 * count * one, MICROBATCHES * TP * count * one)
        for name, count in (("s0.F", 2), ("s0.B", 1))
    ]
    assert (facts.rank_bytes, facts.all_bytes) == (6 * one, 3 * MICROBATCHES * TP * one)


def test_a_collective_less_is_seen(module):
    """The control: without one sum the counts differ."""
    graph = module.graphs["s0.F"]
    kept = [op for op in graph.ops if op.kind != "all_reduce"]
    last = next(op for op in graph.ops if op.kind == "all_reduce")
    fewer = type(graph)(graph.name, graph.ins, graph.outs, (*kept, last), graph.saved)
    facts = split_facts(module.but(graphs={**module.graphs, "s0.F": fewer}))
    assert len(facts.collectives) == 2
    assert facts.all_bytes < split_facts(module).all_bytes


def test_the_command_shows_it(module, folder, capsys):
    path = folder / "local.ir"
    path.write_text(print_module(module))
    assert main(["inspect", str(path), "--sharding", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    facts = split_facts(parse_module(path.read_text()))
    assert [t["local"] for t in shown["tensors"]] == [t.local for t in facts.tensors]
    assert shown["all_bytes"] == facts.all_bytes
    assert main(["inspect", str(path), "--sharding"]) == 0
    text = capsys.readouterr().out
    assert text == show_sharding(facts, terminal_width()) + "\n"
    assert f"f32[16,{HIDDEN}/tp]" in text
    assert f"f32[16,{HIDDEN // TP}]" in text


def test_a_module_without_split_tensors_is_refused(folder):
    whole = ps.plan(ps.from_onnx(folder / "mlp.onnx", dims={"batch": ROWS}), ps.Cluster.local(1)).module
    with pytest.raises(UsageError, match="no tensor"):
        split_facts(whole)


# ------------------------------------------------------------------------------------------------ reasons


@pytest.mark.parametrize("preset", ["megatron", "batch"])
def test_given_layouts_that_are_named_avoid_the_collective(folder, preset):
    """Given before all others, they leave no exchange of that name; without them it is there, which is the control."""
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=MICROBATCHES)

    def planned(*layouts: str) -> ps.Plan:
        model = ps.from_onnx(folder / "mlp.onnx", dims={"batch": ROWS})
        shard = (*layouts, f"preset:{preset}")
        return ps.plan(model, ps.Cluster.local(TP), training, stages=1, mesh=f"tp={TP}", shard=shard)

    plan = planned()
    facts = split_facts(plan.module, plan.reference, plan.as_dict()["shard"])
    avoidable = [use for use in facts.collectives if use.avoided_by]
    assert avoidable
    if preset == "megatron":
        assert avoidable == list(facts.collectives)
        assert avoidable[0].avoided_by == ("fc2.weight=[_,_]", "fc1.bias=[_]", "fc1.weight=[_,_]")
    for use in avoidable:
        others = split_facts(planned(*use.avoided_by).module).collectives
        assert use.result not in {other.result for other in others}


def test_reasons_and_times_of_collectives(module):
    facts = split_facts(module)
    first, second, third = facts.collectives
    assert first.reason == f"{first.behind} is a sum over what is split along tp"
    # Both ranks send each other half of the result twice over one link.
    link = module.cluster.path("cpu:0", "cpu:1")
    size = ROWS * WIDTH * 4
    assert first.seconds == second.seconds == pytest.approx(2 * (link.latency + size / 2 / link.bandwidth))
    assert all(0 <= use.exposed <= use.seconds for use in facts.collectives)
    assert third.avoided_by == ()
    text = show_sharding(facts, 400)
    assert "exchanged because" in text
    assert first.reason in text


def test_diff_compares_layouts(folder, tmp_path, capsys):
    """Of the same model split in two ways, variables and operations whose layouts differ are shown with both."""
    for name, shard in (("a", "preset:megatron"), ("b", "fc1.weight=[/tp,_]")):
        plan = ps.plan(
            ps.from_onnx(folder / "mlp.onnx", dims={"batch": ROWS}), ps.Cluster.local(2), mesh="tp=2", shard=shard
        )
        ps.compile(plan, tmp_path / name, backend="numpy")
    main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    said = capsys.readouterr().out
    assert f"~ var @fc1.weight : [-f32[16-]{{+f32[16/tp+}},[-{HIDDEN}/tp]-]{{+{HIDDEN}]+}}" in said
    assert "[-matmul-]{+all_reduce+}" in said
    # The control: nothing differs from itself.
    main(["diff", str(tmp_path / "a"), str(tmp_path / "a")])
    assert "fc1.weight" not in capsys.readouterr().out


def test_dumps_and_reports_show_layouts(folder, tmp_path, capsys):
    """A dump has the whole and the local form, and the page of a dump has the types in them."""
    words = ["plan", str(folder / "mlp.onnx"), "--dim", "batch=4", "--devices", "2", "--mesh", "tp=2"]
    assert main([*words, "--shard", "preset:megatron", "--dump-ir", str(tmp_path)]) == 0
    (whole,) = tmp_path.glob("*_shard.ir")
    (local,) = tmp_path.glob("*_localize.ir")
    assert f"%fc1 : f32[{ROWS},{HIDDEN}/tp]" in whole.read_text()
    assert "reshard(" in whole.read_text()
    assert f"%fc1 : f32[{ROWS},{HIDDEN // TP}]" in local.read_text()
    assert "all_reduce(" in local.read_text()
    sharding = gather(read_material(open_subject(tmp_path)))["sharding"]
    assert ["fc1.weight", "param", 0, f"f32[16,{HIDDEN}/tp]", f"f32[16,{HIDDEN // TP}]"] in [
        tensor[:5] for tensor in sharding["tensors"]
    ]
    ((_, *row, reasons),) = sharding["collectives"]
    assert row[:3] == ["all_reduce", ["tp"], 2]
    assert [reason.partition(" %")[0] for reason in reasons] == ["matmul", "matmul"]
    assert all(reason.endswith("is a sum over what is split along tp") for reason in reasons)


def test_the_command_names_layouts_that_avoid_exchanges(folder, tmp_path, capsys):
    words = ["compile", str(folder / "mlp.onnx"), "-o", str(tmp_path / "bundle"), "--backend", "numpy", "--loss", "mse"]
    flags = ["--dim", "batch=4", "--devices", "2", "--mesh", "tp=2", "--shard", "preset:megatron"]
    assert main([*words, *flags]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "bundle"), "--sharding", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["collectives"]
    assert shown[0]["avoided_by"] == ["fc2.weight=[_,_]", "fc1.bias=[_]", "fc1.weight=[_,_]"]
    assert all(use["seconds"] > 0 and use["reason"] for use in shown)


def test_a_run_and_its_report_list_collectives(folder, tmp_path, capsys):
    """Counts and bytes of metrics and of the page are those counted without running."""
    steps, microbatches, bundle = 2, 2, str(tmp_path / "bundle")
    words = ["compile", str(folder / "mlp.onnx"), "-o", bundle, "--backend", "numpy", "--loss", "mse"]
    flags = ["--dim", "batch=4", "--devices", "2", "--mesh", "tp=2", "--shard", "preset:megatron"]
    assert main([*words, *flags, "--microbatches", str(microbatches)]) == 0
    files = {"metrics": str(tmp_path / "metrics.jsonl"), "trace": str(tmp_path / "trace.json")}
    run = ["run", bundle, "--data", "synthetic", "--steps", str(steps)]
    assert main([*run, *(word for name, path in files.items() for word in (f"--{name}", path))]) == 0
    facts = split_facts(ps.open(bundle).module)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == steps - 1
    assert row["all_reduce_tp"] == steps * microbatches * len(facts.collectives)
    assert row["all_reduce_tp_bytes"] == steps * facts.all_bytes
    assert 0 <= row["all_reduce_tp_exposed_s"] <= row["all_reduce_tp_s"]
    sharding = gather(read_material(open_subject(bundle), files["trace"]))["sharding"]
    assert [measured[3] for measured in sharding["measured"]] == [
        steps * microbatches * planned[3] for planned in sharding["collectives"]
    ]
    assert sum(measured[4] for measured in sharding["measured"]) == steps * facts.all_bytes
