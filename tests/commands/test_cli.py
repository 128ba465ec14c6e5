"""The command line as users meet it: what the commands print, write and exit with. Runs on the reference back end, which needs no compiler."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.commands.parser import main
from penstock.ir.schedule_names import TRAINING
from penstock.ir.text import parse_module, print_module
from penstock.models import write_gpt
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.runtime.messages.control import Step
from penstock.runtime.telemetry.metrics import Metrics
from penstock.support.errors import UsageError

from .calls import call


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small GPT, compiled for two stages with 2bw, and its dumps."""
    folder = tmp_path_factory.mktemp("cli")
    write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=6)
    words = [
        "compile",
        folder / "gpt.onnx",
        "-o",
        folder / "bundle",
        "--devices",
        "2",
        "--dim",
        "batch=2",
        "--loss",
        "cross_entropy",
    ]
    words += [
        "--optimizer",
        "adamw",
        "--lr",
        "0.01",
        "--microbatches",
        "2",
        "--schedule",
        "2bw",
        "--backend",
        "numpy",
        "--dump-ir",
        folder / "d",
    ]
    assert call(*words) == 0
    return folder


def test_every_dump_prints_back_and_goes_on_to_the_same_module(built: Path, tmp_path: Path) -> None:
    final = (built / "bundle" / "module.ir").read_bytes()
    rows = [line.split("\t") for line in (built / "d" / "passes.tsv").read_text().splitlines()[1:]]
    dumps = {int(path.name[:2]): path for path in (built / "d").glob("[0-9][0-9]_*.ir")}
    changed = {int(row[0]) for row in rows if row[5] == "yes"}
    assert set(dumps) == changed
    assert len(changed) > 8
    for row in rows:
        if int(row[0]) in dumps:
            text = dumps[int(row[0])].read_text()
            assert print_module(parse_module(text)) == text
            assert call("opt", dumps[int(row[0])], "-p", row[6], "-o", tmp_path / "out.ir") == 0
            assert (tmp_path / "out.ir").read_bytes() == final


def test_diff_around_weight_versions_shows_just_versions(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (before,), (after,) = (built / "d").glob("*_schedule.ir"), (built / "d").glob("*_weight-versions.ir")
    assert call("diff", before, after) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    for line in lines:
        assert line.lstrip().startswith("~"), "no line is added or removed"
        marked = line.partition("{+")[2].partition("+}")[0]
        assert "version" in marked or all("@" in word for word in marked.split()) or line.startswith("~ graph")
    assert any("operations" in line and "{+, version=mb+}" in line for line in lines)


def test_diff_of_a_file_with_itself_is_empty(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("diff", built / "bundle", built / "bundle") == 0
    assert capsys.readouterr().out == ""


def test_the_same_inputs_give_the_same_bundle(built: Path, tmp_path: Path) -> None:
    words = [
        "compile",
        built / "gpt.onnx",
        "-o",
        tmp_path / "again",
        "--devices",
        "2",
        "--dim",
        "batch=2",
        "--loss",
        "cross_entropy",
    ]
    words += ["--optimizer", "adamw", "--lr", "0.01", "--microbatches", "2", "--schedule", "2bw", "--backend", "numpy"]
    assert call(*words) == 0
    first = {p.relative_to(built / "bundle"): p.read_bytes() for p in (built / "bundle").rglob("*") if p.is_file()}
    again = {p.relative_to(tmp_path / "again"): p.read_bytes() for p in (tmp_path / "again").rglob("*") if p.is_file()}
    assert first == again


def test_run_writes_metrics_and_resume_goes_on_bitwise(built: Path, tmp_path: Path) -> None:
    def losses(path: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()]

    common = ["--seed", "3", "--timeout", "60"]
    assert call("run", built / "bundle", "--steps", "6", "--metrics", tmp_path / "whole.jsonl", *common) == 0
    assert (
        call(
            "run",
            built / "bundle",
            "--steps",
            "3",
            "--metrics",
            tmp_path / "a.jsonl",
            "--checkpoint",
            tmp_path / "ck",
            *common,
        )
        == 0
    )
    assert (
        call(
            "run",
            built / "bundle",
            "--steps",
            "3",
            "--metrics",
            tmp_path / "b.jsonl",
            "--resume",
            tmp_path / "ck",
            *common,
        )
        == 0
    )
    whole = losses(tmp_path / "whole.jsonl")
    assert len(whole) == 6
    assert losses(tmp_path / "a.jsonl") + losses(tmp_path / "b.jsonl") == whole
    record = json.loads((tmp_path / "whole.jsonl").read_text().splitlines()[0])
    assert {"step", "loss", "lr", "samples", "step_s", "samples_per_s", "grad_norm"} <= set(record)


@pytest.mark.parametrize(
    ("number", "code", "how"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_run_that_is_ended_says_what_is_saved_of_it(
    number: int,
    code: int,
    how: str,
    built: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what it says goes on from there."""
    add = Metrics.add

    def stop(self: Metrics, step: Step) -> None:
        add(self, step)
        if step.step == 2:
            os.kill(os.getpid(), number)

    def ended(*more: str | Path) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(Metrics, "add", stop)
            words = ["run", str(built / "bundle"), "--steps", "6", "--timeout", "60", *map(str, more)]
            if number == signal.SIGINT:
                assert main(words) == code
            else:
                with pytest.raises(SystemExit, match=str(code)):
                    main(words)
        (told,) = [line for line in capsys.readouterr().err.split("penstock: ") if line.startswith(how)]
        return told

    assert ended() == f"{how} after 3 of 6 steps; nothing was saved, because no --checkpoint was given\n"
    told = ended("--checkpoint", tmp_path / "ck")
    assert told.startswith(f"{how} after 3 of 6 steps; nothing was saved yet\n  hint: without --checkpoint-every")
    told = ended("--checkpoint", tmp_path / "ck", "--checkpoint-every", "2", "--checkpoint-wait")
    place = tmp_path / "ck" / "step-000002"
    assert (
        told
        == f"{how} after 3 of 6 steps; the newest checkpoint is {place}\n  hint: --resume {place.parent} --steps 4 goes on from there\n"
    )
    assert call("run", built / "bundle", *told.split("hint: ")[1].split()[:4]) == 0
    assert "step 6/6" in capsys.readouterr().err


def test_verify_compares_the_bundle_with_the_recurrence(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", built / "bundle", "--steps", "2") == 0
    assert capsys.readouterr().out.count("ok") == 4


def test_verify_fails_when_the_bundle_does_not_do_what_its_reference_says(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: another model's reference, with hashes made right, is noticed."""
    other = tmp_path / "bundle"
    words = [
        "compile",
        built / "gpt.onnx",
        "-o",
        other,
        "--devices",
        "2",
        "--dim",
        "batch=2",
        "--loss",
        "cross_entropy",
    ]
    assert (
        call(
            *words,
            "--optimizer",
            "sgd",
            "--lr",
            "0.5",
            "--microbatches",
            "2",
            "--schedule",
            "2bw",
            "--backend",
            "numpy",
        )
        == 0
    )
    reference = (built / "bundle" / "reference.ir").read_text()
    (other / "reference.ir").write_text(reference)
    _rehash(other, "reference.ir")
    assert call("verify", other, "--steps", "4") == 5
    assert "off by more than" in capsys.readouterr().err


def _rehash(bundle: Path, name: str) -> None:
    import hashlib

    manifest = json.loads((bundle / "manifest.json").read_text())
    data = (bundle / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    text = json.dumps(manifest).encode()
    (bundle / "manifest.json").write_bytes(text)
    (bundle / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


@pytest.mark.parametrize(
    "name", ["module.ir", "reference.ir", "weights/s0.safetensors", "plan.json", "manifest.json", "cluster.toml"]
)
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_bundles_are_refused(
    built: Path, tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(built / "bundle", tmp_path / "bundle")
    path = tmp_path / "bundle" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    else:
        del data[len(data) // 2 :]
    path.write_bytes(bytes(data))
    assert call("run", tmp_path / "bundle", "--steps", "1") == 5
    assert name in capsys.readouterr().err


def test_an_illegal_schedule_is_refused_with_the_checkers_words(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "compile",
        built / "gpt.onnx",
        "-o",
        tmp_path / "b",
        "--devices",
        "4",
        "--dim",
        "batch=2",
        "--loss",
        "cross_entropy",
        "--lr",
        "0.1",
    ]
    assert (
        call(*words, "--microbatches", "2", "--schedule", "2bw", "--backend", "numpy", "--dump-ir", tmp_path / "d") == 5
    )
    message = capsys.readouterr().err
    assert "pass weight-versions" in message
    assert "microbatches >= 3" in message
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "d" / "repro.ir").read_text().startswith("// penstock opt repro.ir -p 'weight-versions'")
    assert call("opt", tmp_path / "d" / "repro.ir", "-p", "weight-versions") == 5


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["compile", "{m}", "-o", "{t}/b"], "--dim"),
        (["compile", "{m}", "-o", "{t}/b", "--dim", "batch"], "expected NAME=INT"),
        (["compile", "{m}", "-o", "{t}/b", "--dim", "batch=2", "--dim", "sequence=3"], "sequence"),
        (["compile", "{t}/none.onnx", "-o", "{t}/b"], "none.onnx"),
        (["plan", "{m}", "--dim", "batch=2", "--loss", "hinge"], "hinge"),
        (["plan", "{m}", "--dim", "batch=2", "--loss", "mse", "--optimizer", "rmsprop"], "rmsprop"),
        (
            ["plan", "{m}", "--dim", "batch=2", "--optimizer", "sgd", "--schedule", "2bw"],
            "--optimizer, --schedule without a loss",
        ),
        (["plan", "{m}", "--dim", "batch=\u00b2"], "expected NAME=INT"),
        (["plan", "{m}", "--dim", "batch=99999999999999999999"], "expected NAME=INT"),
        (["run", "{m}", "--steps", "x"], "expected a whole number"),
        (["compile", "{m}", "-o", "{m}", "--dim", "batch=2"], "in the way"),
        (["opt", "{d}/01_simplify.ir", "-p", "decompose", "-o", "{t}"], "directory"),
        (["inspect", "{d}/01_simplify.ir", "--memory"], "no schedule yet"),
        (["inspect", "{d}/01_simplify.ir", "--schedule"], "no schedule yet"),
        (["verify", "{d}/../bundle", "--dim", "batch=2"], "no bounded dimension"),
        (["plan", "{m}", "--dim", "batch=2", "--devices", "2", "--split-at", "nowhere"], "nowhere"),
        (["inspect", "{t}/none"], "none"),
        (["opt", "{m}", "-p", "simplify"], "is a model, and not compiled"),
        (["frobnicate"], "invalid choice"),
        (["plann"], "hint: did you mean plan?"),
        (["opt", "{d}/01_simplify.ir", "-p", "schedul"], "unknown pass 'schedul', did you mean schedule?"),
        (
            ["plan", "{m}", "--dim", "batch=2", "--devices", "2", "--split-at", "h.1.mlp.pro"],
            "hint: did you mean h.1.mlp.proj",
        ),
        (
            ["plan", "{m}", "--dim", "batch=4", "--batch", "10", "--loss", "cross_entropy"],
            "give a --batch that 4 divides",
        ),
        (["run", "{t}", "--stepz", "3"], "unrecognized arguments: --stepz 3\n  hint: `penstock run --help`"),
        (["run"], "required: BUNDLE\n  hint: `penstock run --help`"),
        (["checkpoint"], "required: ls|verify|export\n  hint: `penstock checkpoint --help`"),
        (
            ["checkpoint", "ls", "{t}", "--all"],
            "unrecognized arguments: --all\n  hint: `penstock checkpoint ls --help`",
        ),
        (["--all"], "required: COMMAND\n  hint: `penstock --help`"),
        (["run", "{t}"], "manifest"),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_is_wrong(
    built: Path, tmp_path: Path, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(*(w.format(m=built / "gpt.onnx", t=tmp_path, d=built / "d") for w in words))
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert part in message
    assert code == (5 if part == "manifest" else 2)


def test_a_plan_that_does_not_fit_exits_with_4(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text('[[device]]\nname = "cpu:0"\nmemory = 20000\n')
    words = ["plan", built / "gpt.onnx", "--dim", "batch=2", "--loss", "cross_entropy", "--lr", "0.1"]
    assert call(*words, "--cluster", tmp_path / "c.toml") == 4
    assert "20000" in capsys.readouterr().err
    assert call(*words) == 0


def test_outputs_that_are_all_nan_do_not_verify() -> None:
    from penstock.verification.checks import relative_error

    nothing = np.full(3, np.nan)
    assert relative_error(nothing, nothing) == float("inf")
    assert relative_error(np.array([1.0, np.nan]), np.array([1.0, np.nan])) == 0.0
    assert relative_error(np.array([1.0, 2.0]), np.array([1.0, np.nan])) == float("inf")


def test_every_schedule_that_trains_can_be_asked_for() -> None:
    assert tuple(kind for kind, row in SCHEDULES.items() if row.trains) == TRAINING


def test_plan_prints_a_table_and_json(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", built / "gpt.onnx", "--devices", "2", "--dim", "batch=2", "--loss", "cross_entropy", "--lr", "0.1"]
    assert call(*words) == 0
    out = capsys.readouterr().out
    assert "cpu:1" in out
    assert "peak" in out
    assert call(*words, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [s["devices"] for s in plan["stages"]] == [["cpu:0"], ["cpu:1"]]
    assert plan["memory"]["0"]["peak"] > 0


def test_inspect_shows_graphs_schedule_memory_and_operations(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inspect", built / "bundle") == 0
    assert "0>1   F" in capsys.readouterr().out
    assert call("inspect", built / "bundle", "--graph", "s0.F") == 0
    assert capsys.readouterr().out.lstrip().startswith("graph @s0.F(")
    assert call("inspect", built / "bundle", "--schedule", "--memory") == 0
    out = capsys.readouterr().out
    assert "F0@0" in out
    assert "weights" in out
    assert call("inspect", built / "bundle", "--op", r"= layer_norm\(") == 0
    assert all("layer_norm" in line for line in capsys.readouterr().out.splitlines())
    assert call("inspect", built / "bundle", "--graph", "s9.F") == 2
    assert "s0.F" in capsys.readouterr().err


def test_passes_and_ops_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("passes") == 0
    assert "weight-versions" in capsys.readouterr().out
    assert call("ops") == 0
    out = capsys.readouterr().out
    assert "layer_norm_grad" in out


def test_a_variable_names_the_dump_folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DUMP", str(tmp_path / "d"))
    assert call("plan", built / "gpt.onnx", "--dim", "batch=2") == 0
    assert (tmp_path / "d" / "passes.tsv").exists()


def test_flags_take_underscores_too(built: Path, tmp_path: Path) -> None:
    assert call("plan", built / "gpt.onnx", "--dim", "batch=2", "--dump_ir", tmp_path / "d") == 0
    assert (tmp_path / "d" / "passes.tsv").exists()


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["compile", "{m}", "-o", "{t}/b", "--dim", "batch=2"], "penstock.planning.model.from_onnx"),
        (["verify", "{m}", "--dim", "batch=2"], "penstock.verification.checks.verify_model"),
        (["demo", "-o", "{t}/demo"], "penstock.commands.compiling.demo.run_demo"),
        (["inspect", "{d}/bundle/module.ir", "--measure"], "penstock.inspection.kernels.timing.measure_rows"),
    ],
)
def test_a_bad_size_of_the_cache_is_noticed_before_the_work(
    words: list[str],
    step: str,
    built: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(*given: object, **named: object) -> None:
        raise UsageError("the work began")

    monkeypatch.setattr(step, work)
    for size, said in (("much", "bad PENSTOCK_CACHE_SIZE 'much'"), ("10 MiB", "the work began")):
        monkeypatch.setenv("PENSTOCK_CACHE_SIZE", size)
        assert call(*(w.format(m=built / "gpt.onnx", t=tmp_path, d=built) for w in words)) == 2
        assert said in capsys.readouterr().err


def test_without_the_compiler_nobody_asks_for_the_size_of_the_cache(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_SIZE", "much")
    assert call("compile", built / "gpt.onnx", "-o", tmp_path / "b", "--dim", "batch=2", "--backend", "numpy") == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_compile_that_is_ended_leaves_no_files_behind(number: int, code: int, built: Path, tmp_path: Path) -> None:
    scratch, cache = tmp_path / "scratch", tmp_path / "cache"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(cache)}
    words = [
        "compile",
        str(built / "gpt.onnx"),
        "--dim",
        "batch=2",
        "--loss",
        "cross_entropy",
        "-o",
        str(tmp_path / "bundle"),
    ]
    compiler = subprocess.Popen([sys.executable, "-m", "penstock", *words], env=environment, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not list(scratch.glob("penstock-kernels-*/*.o")):
            assert compiler.poll() is None, compiler.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        compiler.send_signal(number)
        compiler.communicate(timeout=60)
    finally:
        compiler.kill()
        compiler.wait()
    assert compiler.returncode == code
    assert not list(scratch.iterdir())
    assert not (tmp_path / "bundle").exists()
