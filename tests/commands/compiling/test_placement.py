"""Tests of `penstock plan --workload`: the table, the JSON, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.commands.parser import main

CHAIN = 6


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A chain of six, two accelerators and a slow CPU: three nodes each, and one transfer on both sides."""
    rows = [
        {"id": 7 * i, "supportedOnFpga": 1, "cpuLatency": 20.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 2**20}
        for i in range(CHAIN)
    ]
    edges = [{"sourceId": 7 * i, "destId": 7 * i + 7, "cost": 0.125} for i in range(CHAIN - 1)]
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({"maxSizePerFPGA": 2**22, "maxFPGAs": 2, "maxCPUs": 1, "nodes": rows, "edges": edges}))
    return path


def call(*words: object) -> int:
    return main([str(word) for word in words])


def test_the_optimum_and_the_assignment_are_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "--workload", file) == 0
    out = capsys.readouterr().out
    assert out.startswith("largest load, contiguous: 3.125, the optimum\n")
    assert "accelerator 0 3 3.125 0.125 100% 3.0 MiB\n" in re.sub(" +", " ", out)
    assert "accelerator 0: 0 7 14\naccelerator 1: 21 28 35\nCPU 0: nothing\n" in out


@pytest.mark.parametrize("split", ["--contiguous", "--any"])
def test_json_holds_it_all(file: Path, split: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "--workload", file, split, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["objective"], found["contiguous"], found["value"], found["optimal"]) == (
        "throughput",
        split != "--any",
        3.125,
        True,
    )
    assert sorted(node for device in found["devices"] for node in device["nodes"]) == [7 * i for i in range(CHAIN)]
    assert max(device["load"] for device in found["devices"]) == 3.125
    assert found["bound"] <= found["value"]


def test_the_latency_of_a_sample_is_another_objective(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four nodes fit on one accelerator, so one transfer is paid on both sides: 6 + 0.25."""
    assert call("plan", "--workload", file, "--objective", "latency") == 0
    out = capsys.readouterr().out
    assert out.startswith("latency of one sample: 6.25, the optimum\n")
    assert "first start  last end" in out
    assert call("plan", "--workload", file, "--objective", "latency", "--json") == 0
    assert json.loads(capsys.readouterr().out)["value"] == 6.25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "nothing to plan: give MODEL.onnx, or --workload FILE.json"),
        (["plan", "m.onnx", "--workload", "{f}"], "a plan is for one of the two"),
        (["plan", "m.onnx", "--any"], "--any without --workload"),
        (["plan", "--workload", "{f}", "--devices", "2", "--split-at", "x"], "--devices, --split-at with --workload"),
        (["plan", "--workload", "{f}", "--any", "--objective", "latency"], "--any with --objective latency"),
        (["plan", "--workload", "{f}", "--any", "--contiguous"], "not allowed with"),
        (["plan", "--workload", "{f}.none"], "No such file"),
    ],
)
def test_arguments_that_make_no_sense(
    file: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*(word.format(f=file) for word in words)) == 2
    assert message in capsys.readouterr().err


def test_what_fits_nowhere_exits_with_4(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"maxSizePerFPGA": 2**21, "maxCPUs": 0}))
    for split in ("--contiguous", "--any"):
        assert call("plan", "--workload", file, split) == 4
        assert (
            "all nodes take 6.0 MiB (6291456 bytes), all devices have 4.0 MiB (4194304 bytes)"
            in capsys.readouterr().err
        )


def test_problems_of_a_file_are_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('{"nodes": []}')
    assert call("plan", "--workload", file) == 2
    message = capsys.readouterr().err
    assert str(file) in message
    assert "there are no nodes" in message
    assert "maxFPGAs is missing" in message
