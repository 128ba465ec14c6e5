"""Tests of `penstock plan --workload` for profiles of layers: the table, the JSON, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.commands.parser import main

LAYERS = 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a chain of equal layers. A device holds one that saves its values, or two that compute them again."""

    def option(name: str, time: float, saved: float, i: int) -> dict[str, object]:
        sides = ({str(i - 1): 0.0} if i else {}, {str(i + 1): 0.0} if i < LAYERS - 1 else {})
        names = ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB", "syncTimeFw", "syncTimeBw")
        return {"id": name} | dict(zip(names, (time, 0.0, saved, 2.0, *sides), strict=True))

    nodes = [
        {"id": i, "TMPCs": {"1": [option("plain", 2.0, 8.0, i), option("again", 3.0, 1.0, i)]}} for i in range(LAYERS)
    ]
    edges = [{"sourceId": i, "destId": i + 1, "communicationCost": 0.0} for i in range(LAYERS - 1)]
    path = tmp_path / "profiles.json"
    path.write_text(
        json.dumps(
            {"maxMemoryPerDevice": 13.0, "maxDevices": 2, "bandwidth": 1.0, "mbsInBatch": 3}
            | {"nodes": nodes, "edges": edges}
        )
    )
    return path


def call(*words: object) -> int:
    return main([str(word) for word in words])


def test_stages_and_their_options_are_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first stage has two microbatches in flight, so both of its layers compute again; of the second, one does."""
    assert call("plan", "--workload", file) == 0
    out = capsys.readouterr().out
    assert out.startswith("time per sample: 6 on 2 of 2 devices, the optimum\n")
    assert "stage 0 (2 x again): 0 1\nstage 1 (1 x again, 1 x plain): 2 3\n" in out


def test_json_holds_all_of_the_plan(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "--workload", file, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["value"], plan["bound"], plan["optimal"], plan["notes"]) == (6.0, 6.0, True, [])
    assert [stage["in_flight"] for stage in plan["stages"]] == [2, 1]
    assert {node for stage in plan["stages"] for node in stage["nodes"]} == {str(i) for i in range(LAYERS)}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--any"], "--any with profiles"), (["--objective", "latency"], "--objective latency with profiles")],
)
def test_what_profiles_have_no_say_in_is_refused(
    file: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", "--workload", file, *words) == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_is_an_error_of_its_own(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text().replace("13.0", "5.0"))
    assert call("plan", "--workload", file) == 4
    assert "no plan fits the memory of the devices" in capsys.readouterr().err
