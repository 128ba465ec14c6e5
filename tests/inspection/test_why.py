"""Tests of `inspect --why`: its statements on an operation, against the modules themselves."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import onnx
import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.inspection.finding import find, look_up
from penstock.inspection.history import record_of
from penstock.inspection.reasons import stage_reasons
from penstock.inspection.subject import Subject, open_subject
from penstock.inspection.why import why
from penstock.ir.text import print_op
from penstock.models import write_mlp
from penstock.passes.costs.prices import shown_seconds
from penstock.support.errors import UsageError, VerifyError


def test_a_value_a_variable_a_kernel_a_node_and_a_module(bundle: Subject) -> None:
    module = bundle.module
    every = [(graph.name, i, op) for graph in module.graphs.values() for i, op in enumerate(graph.ops)]

    def places(text: str) -> list[tuple[str, int]]:
        return [(place.graph, place.position) for place in find(module, text).places]

    assert places("%h.0.mlp.gelu") == [(g, i) for g, i, op in every if "h.0.mlp.gelu" in [v.name for v in op.outs]]
    assert places("@wte.weight") == [(g, i) for g, i, op in every if op.attrs.get("var") == "wte.weight"]
    assert places("s0.F/k3") == [(g, i) for g, i, op in every if g == "s0.F" and op.attrs.get("kernel") == "k3"]
    assert find(module, "h.0.attn.split").kind == "node"
    assert places("h.0.attn.split") == [(g, i) for g, i, op in every if op.loc == "h.0.attn.split"]
    assert find(module, "h.1.mlp").kind == "path"
    assert places("h.1.mlp") == [(g, i) for g, i, op in every if op.loc.startswith("h.1.mlp.")]
    # Not what only begins alike.
    assert look_up(module, "h.1.ml") is None
    assert look_up(module, "%wte.weight.nowhere") is None


def test_a_wrong_name_is_answered_with_those_like_it(
    bundle: Subject, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        find(bundle.module, "h.0.atn.residul")
    assert "%h.0.attn.residual" in caught.value.hint
    assert main(["inspect", str(built / "bundle"), "--why", "h.0.atn.residul"]) == 2
    assert "%h.0.attn.residual" in capsys.readouterr().err


def test_passes_run_again_did_what_the_dumps_say(bundle: Subject, built: Path) -> None:
    both = open_subject(built / "bundle", built / "dumps")
    for name in ("h.0.attn.qkv.product", "@h.1.ln_1.weight", "h.1.attn.residual", "h.0.mlp"):
        dumped, again = why(both, name), why(bundle, name)
        cut = next(change.number for change in dumped.changes if change.call.startswith("partition"))
        assert [(c.number, c.call, c.lines) for c in dumped.changes if c.number >= cut] == [
            (c.number, c.call, c.lines) for c in again.changes
        ]
        assert "run again" in again.record
        assert "dumped" in dumped.record
        assert dumped.parts == again.parts


def test_every_pass_that_touched_an_operation_is_named(dumps: Subject) -> None:
    """By brute force: the text of the operation after each pass, wherever it stands."""
    name = "h.1.attn.residual"
    texts = []
    for dump in dumps.dumps:
        made = [
            f"{g.name}: {print_op(op)}"
            for g in dump.module.graphs.values()
            for op in g.ops
            if name in [v.name for v in op.outs]
        ]
        carried = [f"{e.src}>{e.dst} {e.phase}" for e in dump.module.edges if name in [v.name for v in e.values]]
        texts.append((dump.number, made + carried))
    expected = [number for (_, before), (number, after) in pairwise(texts) if before != after]
    found = why(dumps, name)
    assert [change.number for change in found.changes] == expected
    assert len(expected) >= 4


def test_what_is_said_of_a_value_that_travels(bundle: Subject) -> None:
    found = why(bundle, "h.0.mlp.residual")
    module = bundle.module
    edges = [(e.src, e.dst, e.phase) for e in module.edges if "h.0.mlp.residual" in [v.name for v in e.values]]
    assert [(c.source, c.target, c.phase) for c in found.crossings] == edges
    inside = why(bundle, "h.0.mlp.gelu")
    assert not inside.crossings
    (part, *_) = inside.parts
    assert (part.graph, part.stage, part.devices) == ("s0.F", 0, ("cpu:0",))
    assert part.kernel is not None
    assert part.kernel.label == f"s0.F/{module.graphs['s0.F'].ops[part.position].attrs['kernel']}"
    assert part.kernel.calls == 3, "one per microbatch"
    assert set(part.kernel.elsewhere) == {"cpu:1"}
    sent = [
        c
        for e in module.edges
        for v in e.values
        for c in why(bundle, f"%{v.name}").crossings
        if (c.source, c.target) == (e.src, e.dst)
    ]
    assert {(c.value, c.nbytes, c.times) for c in sent} == {
        (v.name, v.type.nbytes, 3) for e in module.edges for v in e.values
    }


def test_the_source_is_the_node_of_the_model(bundle: Subject, built: Path) -> None:
    model = onnx.load(built / "gpt.onnx")
    for node in list(model.graph.node)[:12]:
        found = look_up(bundle.module, node.name)
        if found is not None:
            told = {source.name: source for source in why(bundle, node.name).sources}
            assert (told[node.name].op_type, told[node.name].inputs) == (node.op_type, tuple(node.input))


def test_what_a_pass_removed_is_told_by_that_pass(dumps: Subject) -> None:
    first, last = dumps.dumps[0].module, dumps.module
    left = {v.name for g in last.graphs.values() for op in g.ops for v in op.outs}
    gone = next(
        v.name
        for g in first.graphs.values()
        for op in g.ops
        for v in op.outs
        if v.name not in left and look_up(last, v.name) is None
    )
    found = why(dumps, gone)
    assert not found.parts
    assert [change.call for change in found.changes if change.removed]


def test_without_a_record_that_is_said(built: Path, tmp_path: Path) -> None:
    alone = open_subject(built / "dumps" / "01_simplify.ir") if (built / "dumps" / "01_simplify.ir").exists() else None
    path = tmp_path / "m.ir"
    path.write_text((built / "bundle" / "module.ir").read_text())
    for subject in filter(None, (alone, open_subject(path))):
        assert "not known" in record_of(subject).origin
        assert not why(subject, "h.0.mlp.gelu").changes


def test_why_prints_and_is_json(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(built / "bundle"), "--why", "h.0.mlp.gelu", "--dumps", str(built / "dumps")]) == 0
    out = capsys.readouterr().out
    for word in (
        "ONNX node h.0.mlp.gelu",
        "stage 0 on cpu:0",
        "kernel s0.F/",
        "roofline",
        "why stage 0",
        "fuse",
        "kernel=",
    ):
        assert word in out
    assert main(["inspect", str(built / "bundle"), "--why", "h.0.mlp.gelu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "value"


def test_options_that_do_not_go_together_are_refused_at_once(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(built / "nothing"), "--dumps", "d", "--checkpoint", "c", "--json", "--schedule"]) == 2
    said = capsys.readouterr().err
    assert all(flag in said for flag in ("--dumps", "--checkpoint", "--json"))
    assert main(["inspect", str(built / "bundle"), "--why", "x", "--dumps", str(built / "bundle")]) == 2
    assert "NN_pass.ir" in capsys.readouterr().err


def test_what_the_planner_would_have_taken_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mlp(tmp_path / "mlp.onnx", [16, 32, 32, 8])
    words = [
        "compile",
        str(tmp_path / "mlp.onnx"),
        "-o",
        str(tmp_path / "b"),
        "--devices",
        "2",
        "--batch",
        "16",
        "--schedule",
        "auto",
    ]
    assert main([*words, "--loss", "mse", "--backend", "numpy"]) == 0
    subject = open_subject(tmp_path / "b")
    planner = subject.plan["planner"]
    assert planner["what_if"], "a bundle keeps what would have been"
    capsys.readouterr()
    assert main(["plan", *words[1:2], *words[4:], "--loss", "mse", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planner"]["what_if"] == planner["what_if"]
    reasons = stage_reasons(subject.module, 0, subject.plan)
    for name in planner["what_if"]:
        assert sum(reason.startswith(f"what if: {name}: ") for reason in reasons) == 1
    assert not any("no plans were compared" in reason for reason in reasons)
    schedule, usual = subject.plan["schedule"], planner["schedules"][subject.plan["schedule"]]
    assert any(
        re.search(rf"no plan of {schedule} (for what was given is faster|takes less)", reason) for reason in reasons
    )
    # One that was chosen by simulation: formulas are compared with formulas, and what they would have taken is told.
    slower = planner | {
        "step_s": 1.1 * usual,
        "proven": False,
        "passed_over": "but not when it is simulated",
        "simulated": {"2bw": 1.0},
    }
    slower["what_if"] = {"schedule 2bw": 0.9 * usual, "memory without limit": usual}
    told = stage_reasons(
        subject.module, 0, subject.plan | {"schedule": "1f1b", "planner": slower | {"schedules": {"1f1b": usual}}}
    )
    assert f"by these formulas another plan of 1f1b takes {shown_seconds(usual)}, but not when it is simulated" in told
    assert f"what if: memory without limit: {shown_seconds(usual)} per batch, +0.0%" in told
    assert f"what if: schedule 2bw: {shown_seconds(0.9 * usual)} per batch, -10.0%, but 1.000 s simulated" in told
    assert not [reason for reason in told if "faster" in reason]
    # A plan that is not as we write it is said to be so.
    for key in ("step_s", "schedules"):
        broken = {**subject.plan, "planner": {**planner, key: None}}
        with pytest.raises(VerifyError, match=r"plan\.json"):
            stage_reasons(subject.module, 0, broken)


def test_operations_of_the_backward_pass_know_what_they_belong_to(bundle: Subject) -> None:
    found = why(bundle, "%h.0.mlp.gelu")
    ops = [(g.name, op) for g in bundle.module.graphs.values() for op in g.ops]
    assert found.followers == dict(Counter(name for name, op in ops if op.attrs.get("of") == "h.0.mlp.gelu"))
    for part in why(bundle, "h.0.mlp").parts:
        op = bundle.module.graphs[part.graph].ops[part.position]
        assert part.follows == op.attrs.get("of", "")


def test_a_kernel_is_followed_by_what_it_makes(dumps: Subject) -> None:
    found = why(dumps, "s0.F/k3")
    told = [line for change in found.changes for line in change.lines]
    assert any("@s0.F" in line for line in told)
    assert not any("graph @s0.B" in line or "graph @B" in line for line in told), "of the forward pass alone"


@pytest.mark.slow
def test_a_module_of_torch_is_found_by_its_path(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), inner, torch.nn.Linear(16, 4))
    plan = ps.plan(
        ps.from_torch(net, (torch.randn(4, 8),)), ps.Cluster.local(2), ps.Training(loss="mse", microbatches=2), stages=2
    )
    subject = open_subject(ps.compile(plan, tmp_path / "b", backend="numpy"))
    found = why(subject, "2.1")
    assert [(source.kind, source.op_type, source.module) for source in found.sources] == [("torch call", "gelu", "2.1")]
    assert {part.text.partition(" = ")[2].partition("(")[0] for part in found.parts} == {"gelu", "gelu_grad"}
    (weight, *_) = [source for source in why(subject, "@2.0.weight").sources if source.name == "2.0.weight"]
    assert weight.kind == "variable"
    below = {source.module for source in why(subject, "2").sources if source.module}
    assert below == {"2.0", "2.1"}
