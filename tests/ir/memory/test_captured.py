"""What a plan has for captured calls: sets counted by hand, and what is left of a device's memory. What a device gives for them is counted in
tests/gpu/rank/test_captures.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock import api
from penstock.frontends.training import Training
from penstock.inspection.memory.curves import memory_curves
from penstock.inspection.views.text import show_memory
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.cluster.gpus import CONTEXT, WORKSPACES
from penstock.ir.graph import Graph, Module, Value
from penstock.ir.memory.captured import captured_bytes, captured_room, captured_wish, made_values
from penstock.ir.memory.predict import measure_memory
from penstock.ir.ops import make
from penstock.ir.training.optimizers import AdamW
from penstock.ir.types import TensorType
from penstock.models import write_gpt

PAGE = 4096


def test_a_set_has_temporaries_results_and_what_comes_from_elsewhere() -> None:
    """Of 3 pages, 2 pages and a byte, and 1 byte: whole pages."""
    x, w = Value("x", TensorType("f32", (3 * PAGE // 4,))), Value("w", TensorType("i8", (2 * PAGE + 1,)))
    inner = make("tanh", [x], ["t"])
    root, small = make("exp", inner.outs, ["e"]), make("sum", inner.outs, ["l"], axes=(0,))
    copy = make("neg", [w], ["n"])
    graph = Graph("s0.F", (x, w), (*root.outs, *small.outs, *copy.outs), (inner, root, small, copy))
    # Inputs of 3 and 3 pages, the temporary of 3, results of 3, 1 and 3.
    assert captured_bytes(graph, ()) == 16 * PAGE
    # The control: what another graph of the stage makes is read where it lies.
    assert captured_bytes(graph, {"x"}) == 13 * PAGE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    folder: Path = tmp_path_factory.mktemp("model")
    path = write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=8)
    return api.from_onnx(path, dims={"batch": 4})


def planned(model: api.Model, devices: str, schedule: str = "1f1b") -> Module:
    training = Training(loss="cross_entropy", optimizer=AdamW(lr=1e-3), microbatches=4)
    return api.plan(model, Cluster.listed(devices), training, schedule=schedule, microbatches=4).module


def having(module: Module, memory: int, **changes: str) -> Module:
    """Return a module on GPUs with so much memory."""

    def changed(device: Device) -> Device:
        return replace(device, spaces=(("hbm", memory),), **changes)  # type: ignore[arg-type]

    assert module.cluster is not None
    return module.but(cluster=replace(module.cluster, devices=tuple(map(changed, module.cluster.devices))))


def test_each_weight_version_and_microbatch_in_flight_has_a_set(model: api.Model) -> None:
    module = planned(model, "sm_90,sm_90")
    for rank, in_flight in ((0, 2), (1, 1)):
        graphs = {kind: module.stage_graph(rank, kind) for kind in "FBU"}
        sets = {kind: captured_bytes(g, made_values(filter(None, graphs.values()))) for kind, g in graphs.items() if g}
        expected = (in_flight + 1) * (sets["F"] + sets["B"]) + sets["U"]
        assert captured_wish(module, rank) == {rank: expected}
        # The control: another version of the weights doubles it.
        assert sum(captured_wish(planned(model, "sm_90,sm_90", "2bw"), rank).values()) > 1.5 * expected
    assert captured_wish(planned(model, "cpu,cpu"), 0) == {}


def test_captured_calls_get_what_the_plans_on_a_device_leave(model: api.Model) -> None:
    module = planned(model, "sm_90,sm_90")
    wish, peaks = captured_wish(module, 0)[0], {rank: row.peak for rank, row in measure_memory(module).items()}
    taken = peaks[0] + CONTEXT + WORKSPACES
    assert captured_room(module, 0) == {0: wish}
    assert captured_room(module, 0, left=1000) == {0: 1000}
    assert captured_room(having(module, taken + wish), 0) == {0: wish}
    assert captured_room(having(module, taken + wish - 1), 0) == {0: wish - 1}
    assert captured_room(having(module, taken - 1), 0) == {0: 0}
    # Two ranks on one GPU leave less, and each has half of it.
    both = taken + peaks[1] + CONTEXT + WORKSPACES
    assert captured_room(having(module, both + 2000, gpu="0"), 0) == {0: 1000}


def test_the_view_of_memory_says_what_they_keep(model: api.Model) -> None:
    module = planned(model, "sm_90,sm_90")
    text = show_memory(memory_curves(module))
    assert text.count("captured calls keep up to") == 2
    assert "captured calls" not in show_memory(memory_curves(planned(model, "cpu,cpu")))
