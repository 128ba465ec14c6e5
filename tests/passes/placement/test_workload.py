"""Tests of files in the public placement format: those that are read, and refusals that list all problems at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.passes.placement.workload import load_workload, read_workload
from penstock.support.errors import UsageError

NODE = {
    "id": 1,
    "supportedOnFpga": 1,
    "cpuLatency": 2.0,
    "fpgaLatency": 1.0,
    "isBackwardNode": False,
    "size": 3.0,
    "colorClass": 7,
}
FILE = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [NODE, NODE | {"id": 2, "supportedOnFpga": False, "colorClass": None, "name": "two"}],
    "edges": [{"sourceId": 1, "destId": 2, "cost": 0.5, "size": 12}],
}


def problems(data: object) -> str:
    with pytest.raises(UsageError) as caught:
        read_workload(data, "file.json")
    assert caught.value.where == "file.json"
    return caught.value.what


def test_a_file_is_read() -> None:
    found = read_workload(FILE)
    assert found.ids == (1, 2)
    first, second = found.problem.nodes
    assert (first.times, first.memory, first.transfer, first.colour, first.backward) == ((1.0, 2.0), 3.0, 0.5, 7, False)
    assert (second.times, second.colour, second.transfer) == ((float("inf"), 2.0), None, 0.0)
    accelerator, cpu = found.problem.kinds
    assert (accelerator.count, accelerator.memory, accelerator.pays_transfers) == (2, 100.0, True)
    assert (cpu.count, cpu.memory, cpu.pays_transfers) == (1, float("inf"), False)


def test_all_problems_are_reported_at_once() -> None:
    data = {
        "maxSizePerFPGA": -1,
        "maxFPGAs": True,
        "nodes": [
            NODE,
            NODE,
            NODE | {"id": 2, "cpuLatency": float("nan"), "supportedOnFpga": 2, "size": "large"},
            {"id": 3},
            4,
        ],
        "edges": [
            {"sourceId": 1, "destId": 9, "cost": 1.0},
            {"sourceId": 1, "destId": 2, "cost": 2.0},
            {"sourceId": 1, "destId": 3, "cost": 3.0},
            {"sourceId": "1", "destId": 3, "cost": -3.0},
        ],
    }
    text = problems(data)
    for expected in (
        "maxSizePerFPGA must be a number from 0 to 1e+100, got -1",
        "maxFPGAs must be a whole number",
        "maxCPUs is missing",
        "nodes[4] must be an object, got a number",
        "node 1 is listed 2 times",
        "node 2: cpuLatency must be a number from 0 to 1e+100, got NaN",
        "node 2: supportedOnFpga must be true or false, got 2",
        'node 2: size must be a number from 0 to 1e+100, got "large"',
        "node 3: fpgaLatency is missing",
        "edges[0] leads from 1 to 9, there is no node 9",
        "edges from node 1 cost 2 and 3, expected one cost for its output",
        'edges[3]: sourceId must be a whole number, got "1"',
        "edges[3]: cost must be",
    ):
        assert expected in text
    assert "circle" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"edges": [*FILE["edges"], {"sourceId": 2, "destId": 1, "cost": 0}]}, "round a circle: 1 -> 2 -> 1"),
        ({"edges": [{"sourceId": 2, "destId": 2, "cost": 0}]}, "round a circle: 2 -> 2"),
        ({"nodes": [NODE | {"isBackwardNode": 1}, NODE | {"id": 2}]}, "from backward node 1 to forward node 2"),
        ({"maxCPUs": 0, "maxFPGAs": 0}, "there are no devices"),
        ({"nodes": []}, "there are no nodes"),
        ({"edges": {}}, "edges must be a list, got an object"),
        ({"maxFPGAs": 10**400}, "whole number from 0 to 10000"),
        ({"maxSizePerFPGA": 10**400}, "maxSizePerFPGA must be a number"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], expected: str) -> None:
    assert expected in problems(FILE | changes)


def test_anything_but_an_object_is_refused() -> None:
    assert "expected an object with nodes and edges, got a list" in problems([])


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("{")
    with pytest.raises(UsageError, match="no JSON"):
        load_workload(file)
    file.write_text(json.dumps(FILE))
    assert load_workload(file) == read_workload(FILE)
