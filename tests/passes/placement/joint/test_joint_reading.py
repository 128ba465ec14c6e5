"""Tests of files with profiles of layers: those that are read, and refusals that list all problems at once."""

from __future__ import annotations

import pytest

from penstock.passes.placement.joint.reading import are_profiles, read_profiles
from penstock.support.errors import UsageError

from .drawn import as_profiles, draw_joint_problem

OPTION = {
    "id": "plain",
    "timePerSample": 1.0,
    "parameterSize": 2.0,
    "memoryUsageA": 3.0,
    "memoryUsageB": 4.0,
    "syncTimeFw": {},
    "syncTimeBw": {},
}
FILE = {"maxMemoryPerDevice": 9.0, "maxDevices": 2, "bandwidth": 1.0, "mbsInBatch": 4, "edges": []}


def problems(data: object) -> str:
    with pytest.raises(UsageError) as caught:
        read_profiles(data, "file.json")
    assert caught.value.where == "file.json"
    return caught.value.what


@pytest.mark.parametrize("seed", range(20))
def test_a_file_says_what_was_written(seed: int) -> None:
    problem = draw_joint_problem(seed)
    data = as_profiles(problem)
    assert are_profiles(data)
    profiles = read_profiles(data)
    assert profiles.problem == problem
    assert profiles.ids == tuple(10 * v for v in range(len(problem.layers)))


def test_the_documented_name_of_the_batch_is_read_too() -> None:
    data = as_profiles(draw_joint_problem(1))
    data["maxBatchSize"] = data.pop("mbsInBatch")
    assert read_profiles(data).problem == draw_joint_problem(1)


def test_all_problems_are_reported_at_once() -> None:
    nodes = [
        {"id": 1, "TMPCs": {"1": [OPTION, OPTION], "two": [], "2": [OPTION | {"id": "", "timePerSample": -1}]}},
        {"id": 1, "TMPCs": []},
        {"id": 3, "TMPCs": {"1": [OPTION | {"syncTimeFw": {"x": 1.0}, "syncTimeBw": None}]}},
    ]
    edges = [
        {"sourceId": 1, "destId": 3, "communicationCost": 1.0},
        {"sourceId": 1, "destId": 3, "communicationCost": 2.0},
        {"sourceId": 1, "destId": 9, "communicationCost": 2.0},
    ]
    text = problems(FILE | {"maxDevices": 0, "bandwidth": True, "nodes": nodes, "edges": edges})
    for part in (
        "maxDevices must be at least 1, got 0",
        "bandwidth must be a number from 0 to 1e+100, got true",
        "node 1 is listed 2 times",
        "node 1: degree 1 has option 'plain' twice",
        "node 1: TMPCs must have degrees from 1 to 9999, got 'two'",
        "node 1, degree 2, option 0: id must be text, got text",
        "node 1, degree 2, option 0: timePerSample must be a number from 0 to 1e+100, got -1",
        "node 1: TMPCs must be an object of lists by degree, got a list",
        "node 3, degree 1, option 0: syncTimeFw must have ids of nodes, got 'x'",
        "node 3, degree 1, option 0: syncTimeBw must be an object of bytes by node, got null",
        "edges[1] is there twice, with 1 and 2 bytes",
        "edges[2] leads from 1 to 9, there is no node 9",
    ):
        assert part in text, part


def test_options_have_the_edges_of_their_layer_and_no_other() -> None:
    nodes = [
        {"id": 1, "TMPCs": {"1": [OPTION | {"syncTimeBw": {"7": 1.0}}]}},
        {"id": 2, "TMPCs": {"1": [OPTION | {"syncTimeFw": {"1": 0.0}}]}},
    ]
    edges = [{"sourceId": 1, "destId": 2, "communicationCost": 1.0}]
    text = problems(FILE | {"nodes": nodes, "edges": edges})
    assert "node 1, degree 1, option 'plain': syncTimeBw lacks node 2" in text
    assert "node 1, degree 1, option 'plain': syncTimeBw has no edge to or from node 7" in text


def test_edges_lead_round_no_circle() -> None:
    nodes = [{"id": i, "TMPCs": {"1": [OPTION]}} for i in (1, 2)]
    edges = [{"sourceId": i, "destId": 3 - i, "communicationCost": 1.0} for i in (1, 2)]
    assert "edges lead round a circle: 1 -> 2 -> 1" in problems(FILE | {"nodes": nodes, "edges": edges})


@pytest.mark.parametrize("degree", ["9" * 5000, "01", "0", "1_0"])
def test_degrees_are_small_and_written_in_one_way(degree: str) -> None:
    text = problems(FILE | {"nodes": [{"id": 1, "TMPCs": {degree: [OPTION]}}]})
    assert "TMPCs must have degrees from 1 to 9999" in text
    assert len(text) < 200


def test_bandwidths_that_make_no_times_are_refused() -> None:
    text = problems(FILE | {"nodes": [{"id": 1, "TMPCs": {"1": [OPTION]}}], "bandwidth": 1e-320})
    assert "bandwidth must be at least 1e-09" in text
