"""Files for other programs: read by those, or by a reader of the format that knows nothing of how they were written."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.commands.parser import main
from penstock.inspection.exports.dot import _quoted, dot_text
from penstock.inspection.exports.onnx_file import annotate, program_model
from penstock.inspection.exports.schedule import simulated
from penstock.inspection.subject import Subject
from penstock.ir.schedule import Action

_STRING = r'"((?:[^"\\]|\\.)*)"'
_CLUSTER = re.compile(rf"subgraph {_STRING} {{\n\s+label={_STRING};\n(.*?)\n  }}", re.DOTALL)
_BOX = re.compile(rf"^\s*{_STRING} \[", re.MULTILINE)
_ARROW = re.compile(rf"^\s*{_STRING} -> {_STRING}", re.MULTILINE)


def test_the_picture_has_stages_as_clusters_and_the_flow_as_arrows(bundle: Subject) -> None:
    module = bundle.module
    text = dot_text(module)
    makers = {
        v.name: f"s{s}.F/{i}" for s in (0, 1) for i, op in enumerate(module.graphs[f"s{s}.F"].ops) for v in op.outs
    }
    makers |= {v.name: f"input {v.name}" for v in module.inputs}
    arrows, boxes = set(), {}
    for s in (0, 1):
        ops = module.graphs[f"s{s}.F"].ops
        hidden = {v.name for op in ops if op.kind in ("read", "const") for v in op.outs}
        boxes[s] = {f"s{s}.F/{i}" for i, op in enumerate(ops) if op.kind not in ("read", "const")}
        arrows |= {(makers[v.name], f"s{s}.F/{i}") for i, op in enumerate(ops) for v in op.ins if v.name not in hidden}
    found = {match[1]: (match[2], {m[1] for m in _BOX.finditer(match[3])}) for match in _CLUSTER.finditer(text)}
    assert found == {f"cluster_s{s}": (f"stage {s} on cpu:{s}", boxes[s]) for s in (0, 1)}
    assert set(_ARROW.findall(text)) == arrows
    crossing = [line for line in text.splitlines() if "style=bold" in line]
    assert len(crossing) == len({(a, b) for a, b in arrows if a.startswith("s0") and b.startswith("s1")}) > 0
    assert text.count("{") == text.count("}")


@given(st.text())
def test_strings_of_dot_end_where_they_should(text: str) -> None:
    quoted = _quoted(text)
    assert re.fullmatch(_STRING, quoted, re.DOTALL)
    assert re.sub(r"\\(.)", r"\1", quoted[1:-1], flags=re.DOTALL) == text


def test_the_table_is_the_schedule(built: Path, bundle: Subject, tmp_path: Path) -> None:
    assert main(["inspect", str(built / "bundle"), "--export", str(tmp_path / "s.csv"), "--batches", "2"]) == 0
    with (tmp_path / "s.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    schedule = bundle.module.schedule
    assert schedule is not None
    made = simulated(bundle.module, 2)
    for rank, actions in schedule.expand_all(2).items():
        own = [row for row in rows if row["rank"] == str(rank)]
        assert [Action.parse(row["action"]) for row in own] == actions
        assert [float(row["end_s"]) for row in own] == list(made.simulated.lines[rank].finishes)
        for row, action in zip(own, actions, strict=True):
            assert row["microbatch"] == ("" if action.kind == "U" else str(action.mb))
            assert row["version"] == ("" if action.version is None else str(action.version))
    # Before messages are made there are no times.
    staged = next((built / "dumps").glob("*_schedule.ir"))
    assert main(["inspect", str(staged), "--export", str(tmp_path / "early.csv")]) == 0
    with (tmp_path / "early.csv").open(encoding="utf-8", newline="") as file:
        assert {row["start_s"] for row in csv.DictReader(file)} == {""}
    assert main(["inspect", str(built / "dumps" / "00_input.ir"), "--export", str(tmp_path / "none.csv")]) == 2
    assert not (tmp_path / "none.csv").exists()


def test_the_trace_is_the_simulated_run(built: Path, bundle: Subject, tmp_path: Path) -> None:
    assert main(["inspect", str(built / "bundle"), "--export", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    made = simulated(bundle.module, 3)
    for rank in (0, 1):
        spans = [(e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert spans == [(str(a), pytest.approx(start * 1e6, abs=0.1)) for a, start, _ in made.simulated.timed(rank)]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0 (stage 0, cpu:0)",
        "rank 1 (stage 1, cpu:1)",
    }
    assert len([e for e in events if e["ph"] == "s"]) == len([e for e in events if e["ph"] == "f"]) > 0


def run(path: Path) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    tokens = np.random.default_rng(0).integers(0, 20, (2, 6))
    return session.run(None, {session.get_inputs()[0].name: tokens})


def props(node: onnx.NodeProto | onnx.ModelProto) -> dict[str, str]:
    return {prop.key: prop.value for prop in node.metadata_props}


def test_the_model_says_where_its_nodes_run_and_computes_the_same(built: Path, bundle: Subject, tmp_path: Path) -> None:
    assert main(["inspect", str(built / "bundle"), "--export", str(tmp_path / "m.onnx")]) == 0
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    model, source = onnx.load(tmp_path / "m.onnx"), onnx.load(built / "gpt.onnx")
    assert [n.name for n in model.graph.node] == [n.name for n in source.graph.node]
    for ours, theirs in zip(run(tmp_path / "m.onnx"), run(built / "gpt.onnx"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    told = {n.name: props(n) for n in model.graph.node}
    seen = set()
    for stage in (0, 1):
        for op in bundle.module.graphs[f"s{stage}.F"].ops:
            if op.loc in told and op.kind not in ("read", "const"):
                assert str(stage) in told[op.loc]["penstock.stage"].split(", ")
                assert f"cpu:{stage}" in told[op.loc]["penstock.device"].split(", ")
                seen.add((op.loc, str(stage)))
    # Nothing more is said than that, and both stages are.
    assert {(name, s) for name, p in told.items() for s in p.get("penstock.stage", "").split(", ") if s} >= seen
    assert {p.get("penstock.stage") for p in told.values()} >= {"0", "1"}
    assert props(model)["penstock.stages"] == "0 on cpu:0; 1 on cpu:1"
    # What runs inside of an attention is where that is; of a GPT nothing is folded away.
    assert all({"penstock.stage", "penstock.device"} <= p.keys() for p in told.values())
    for layer in (0, 1):
        mix = told[f"h.{layer}.attn.mix"]
        assert mix["penstock.kernel"]
        assert all(told[f"h.{layer}.attn.{name}"] == mix for name in ("scaled", "masked", "softmax"))
    # The control: the source has nothing of the kind.
    assert not any(props(n) for n in source.graph.node)


def test_nodes_without_operations_are_where_their_results_are_taken(bundle: Subject) -> None:
    """Names of the GPT's nodes place some of a graph of our own: alone, before both stages, computed from shapes or constants, and taken by nobody."""
    body = onnx.parser.parse_graph("""
        main (float[2, 6, 16] x) => (float[2, 6, 16] y) {
            inside = Relu(x)  deeper = Relu(inside)  left = Relu(deeper)
            between = Relu(left)  right = Add(between, scaled)
            both = Relu(x)  first = Add(both, fixed)  second = Add(both, left)
            shape = Shape(deeper)  length = Cast <to=1> (shape)  scaled = Relu(length)
            weight = Constant <value_float=1.0> ()  fixed = Relu(weight)
            lost = Relu(x)
        }""")
    at = {"left": "h.0.ln_1", "right": "h.1.ln_2", "first": "h.0.ln_2", "second": "ln_f"}
    for node in body.node:
        node.name = at.get(node.output[0], node.output[0])
    model = onnx.helper.make_model(body)
    annotate(model, bundle.module)
    told = {node.output[0]: props(node).get("penstock.stage") for node in model.graph.node}
    expected = {"left": "0", "right": "1", "first": "0", "second": "1", "inside": "0", "deeper": "0", "between": "1"}
    assert {name: stage for name, stage in told.items() if stage is not None} == expected


def test_a_program_without_a_source_is_a_model_to_look_at(dumps: Subject) -> None:
    for dump in dumps.dumps:
        model = program_model(dump.module)
        onnx.checker.check_model(model)
        kinds = [n.op_type for n in model.graph.node]
        forward = [g for name, g in dump.module.graphs.items() if name.split(".")[-1] in ("main", "F")]
        assert sorted(kinds) == sorted(op.kind for g in forward for op in g.ops if op.kind != "read")
    assert {props(n)["penstock.stage"] for n in model.graph.node} == {"0", "1"}
    broken = program_model(dumps.module)
    broken.graph.node[1].input[0] = "nowhere"
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(broken)


def test_places_where_nothing_can_be_written_are_refused_together(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        str(tmp_path / "x.png"),
        str(built / "bundle" / "x.dot"),
        str(tmp_path),
        str(tmp_path / "a.csv"),
        str(tmp_path / "a.csv"),
    ]
    assert main(["inspect", str(built / "bundle"), *(word for path in wrong for word in ("--export", path))]) == 2
    said = capsys.readouterr().err
    assert "x.png: expected a name that ends in" in said
    assert "is inside" in said
    assert "named twice" in said
    assert not (tmp_path / "a.csv").exists()


def test_no_file_replaces_what_is_read_or_another_one(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = next((built / "dumps").glob("*_simplify.ir"))
    ir = tmp_path / "x.ir"
    ir.write_bytes(module.read_bytes())
    (tmp_path / "hard.json").hardlink_to(ir)
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "soft.json").symlink_to(tmp_path / "t.json")
    bundle, t, same = str(built / "bundle"), str(tmp_path / "t.json"), str(tmp_path / "same.json")
    before = {path: path.read_bytes() for folder in (tmp_path, built) for path in folder.rglob("*") if path.is_file()}
    for words, said in (
        ([str(ir), "--html", str(ir)], "x.ir: is what is looked at"),
        ([str(ir), "--html", str(tmp_path / "hard.json")], "hard.json: is what is looked at"),
        ([bundle, "--html", f"{bundle}/manifest.json"], "manifest.json: is inside of what is looked at"),
        ([bundle, "--html", t, "--trace", t], "t.json: is --trace"),
        ([bundle, "--html", "x.html", "--export", str(tmp_path / "soft.json"), "--trace", t], "soft.json: is --trace"),
        ([bundle, "--html", f"{built}/dumps/index.html", "--dumps", f"{built}/dumps"], "is inside of --dumps"),
        ([bundle, "--params", "--checkpoint", str(tmp_path), "--export", same], "same.json: is inside of --checkpoint"),
        ([bundle, "--export", same, "--html", same], "named twice"),
        ([bundle, "--export", str(tmp_path / "m.onnx"), "--html", str(tmp_path / "m.onnx.data")], "named twice"),
    ):
        assert main(["inspect", *words]) == 2, words
        assert said in capsys.readouterr().err
    assert {
        path: path.read_bytes() for folder in (tmp_path, built) for path in folder.rglob("*") if path.is_file()
    } == before
    # Control: beside them there is room, in a folder that is not there yet, too.
    assert main(["inspect", str(ir), "--html", str(tmp_path / "new" / "x.html")]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.html"]


def test_empty_names_are_no_names(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("why", "op", "graph", "html", "dumps"):
        assert main(["inspect", str(built / "bundle"), f"--{name}", ""]) == 2
        assert f"--{name} without a name" in capsys.readouterr().err


def test_more_batches_than_anybody_would_see_are_refused(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--schedule"], ["--memory"], ["--export", str(tmp_path / "s.csv")]):
        assert main(["inspect", str(built / "bundle"), *words, "--batches", "100000000"]) == 2
        assert "can be shown" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
