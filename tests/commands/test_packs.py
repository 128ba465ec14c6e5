"""Every command on a bundle whose devices have several stages: what it says is of all stages of a device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.commands.parser import main
from penstock.inspection.reasons import stage_reasons
from penstock.inspection.subject import open_subject
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_mlp


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A bundle of zb-v on two devices, with metrics and trace of a run."""
    folder = tmp_path_factory.mktemp("packs")
    model = ps.from_onnx(write_mlp(folder / "mlp.onnx", [16] * 6, batch=4))
    training = ps.Training("mse", ps.SGD(lr=0.01), microbatches=4)
    plan = ps.plan(model, Cluster.local(2), training, schedule="zb-v", packs=2)
    bundle = ps.compile(plan, folder / "bundle", backend="numpy")
    metrics, trace = folder / "metrics.jsonl", folder / "trace.json"
    words = ["run", bundle, "--steps", 6, "--metrics", metrics, "--trace", trace, "--timeout", 60]
    assert main(list(map(str, words))) == 0
    return bundle, metrics, trace


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    code, shown = main(list(map(str, words))), capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def test_a_run_is_graded_by_stage(ran: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundle, metrics, trace = ran
    graded = json.loads(said(capsys, "plan", bundle, "--grade", metrics, "--trace", trace, "--json"))
    kinds = [(row["rank"], row["kind"]) for row in graded["computing"]]
    module = open_bundle(bundle).module
    assert kinds == [
        (rank, f"{stage}{kind}")
        for rank, stages in enumerate(((0, 3), (1, 2)))
        for stage in stages
        for kind in ("F", "B", "W", "U")
        if module.stage_graph(stage, kind) is not None
    ]
    assert {"0F", "0B", "1F", "2B", "3F", "3B"} <= {kind for _, kind in kinds}
    assert all(row["measured_s"] > 0 for row in graded["computing"])


def test_time_goes_to_the_graphs_of_each_stage(
    ran: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _, trace = ran
    text = said(capsys, "inspect", bundle, "--where-time-goes", "--trace", trace)
    rows = [line.split() for line in text.splitlines()]
    calls = {(row[0], row[1]): row[2] for row in rows if len(row) > 3 and row[1].startswith("s")}
    assert calls["0", "s0.F"] == calls["0", "s3.F"] == calls["1", "s2.B"] == "4"
    assert calls["0", "s3.U"] == "1"
    assert ("0", "s1.F") not in calls


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("inspect", "--memory"), "rank 0, stages 0, 3 on cpu:0"),
        (("simulate",), "   0    0 3  cpu:0"),
        (("inspect", "--links"), "0 > 1"),
        (("inspect", "--schedule"), "rank 1"),
        (("verify",), "ok"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_views_name_all_stages(
    words: tuple[str, ...], wanted: str, ran: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted in said(capsys, words[0], ran[0], *words[1:])


def test_the_report_reads_the_trace(ran: tuple[Path, Path, Path], tmp_path: Path) -> None:
    bundle, _, trace = ran
    page = tmp_path / "report.html"
    assert main(["inspect", str(bundle), "--html", str(page), "--trace", str(trace)]) == 0
    assert page.stat().st_size > 10_000


def test_a_plan_with_packs_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Formulas are those of the best plan with a stage on each device: nothing says that they are of the packs."""
    model = write_mlp(tmp_path / "mlp.onnx", [16] * 6, batch=4)
    words = (
        "compile",
        model,
        "-o",
        tmp_path / "b",
        "--devices",
        2,
        "--loss",
        "mse",
        "--batch",
        16,
        "--backend",
        "numpy",
    )
    said(capsys, *words, "--schedule", "zb-v")
    planned = ("plan", model, "--devices", 2, "--loss", "mse", "--batch", 16, "--schedule", "zb-v")
    lines = said(capsys, *planned).splitlines()
    # What the changes are compared with is named: it is no plan of zb-v, and nothing is "the same" as the packs.
    (against,) = [line for line in lines if line.startswith("planner: with one thing changed")]
    assert against.endswith(" of 1f1b with one stage on a device:")
    assert any(re.search(r"2 stages .*zb-v: .*; activations on cpu:\d: .* in place of ", line) for line in lines)
    changes = [line for line in lines if line.startswith("what if: ") and line.endswith(")")]
    assert any("what if: schedule gpipe: " in line for line in changes)
    assert all(line.endswith(" 1f1b with one stage on a device)") for line in changes)
    plan = json.loads((tmp_path / "b" / "plan.json").read_text())
    assert plan["schedule"] == "zb-v"
    assert plan["planner"]["formulas_of"] == "1f1b"
    subject = open_subject(tmp_path / "b")
    why = "\n".join(stage_reasons(subject.module, 3, subject.plan))
    assert "zb-v with several stages on a device was faster than 1f1b, by simulation" in why
    assert "2 stages on each device, zb-v: " in why
    assert not any("no plan of zb-v" in line for line in why.splitlines() if "tensor parallelism" not in line)
    assert re.search("with one thing changed .* against .* of 1f1b with one stage on a device:", why)
    assert "rank 0 computes" in why  # stage 3 is on the first device
    assert main(["inspect", str(tmp_path / "b"), "--html", str(tmp_path / "page.html")]) == 0
