"""A decoder and a convolutional network with dropout train split over devices as on one device, over 50 steps.

The oracle is the interpreter on one device in float64, which knows neither meshes nor kernels. Compiled runs in float32
have its losses to 1e-5, a second run of them has the same bits, and so has a run whose collectives stand where
`localize` put them. In float64 the interpreter's own run of all ranks has the losses to 1e-10. Dropout draws on every
rank what one device draws at the same elements, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.schedules import run_schedule, watch_ranks
from penstock.ir.ops import EXCHANGES
from penstock.passes import pipelines
from penstock.passes.pipelines import PipelineEntry
from penstock.planning.plan import Plan

STEPS, BATCH, MICROBATCHES, KEPT = 50, 4, 2, 0.9
WIDTH, HEADS, VOCABULARY, POSITIONS = 32, 4, 30, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(1 - KEPT)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, _ = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(batch, positions, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, positions, WIDTH))
        return x + self.fc2(self.dropout(F.gelu(self.fc1(self.norm2(x)))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(6 * 16, 20), nn.Linear(20, 5)
        self.dropout = nn.Dropout(1 - KEPT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1)))))


COLUMNS, ROWS = (None, "tp"), ("tp", None)
LAYOUTS: dict[str, dict[str, object]] = {
    "gpt": {
        **{f"blocks.*.{name}": "Colwise" for name in ("q", "k", "v", "fc1")},
        **{f"blocks.*.{name}": "Rowwise" for name in ("proj", "fc2")},
        "head.weight": ROWS,
        "tokens.weight": ROWS,
    },
    "cnn": {
        "conv1.weight": ("tp", None, None, None),
        "conv1.bias": ("tp",),
        "conv2.weight": (None, "tp", None, None),
        "fc1": "Colwise",
        "fc2": "Rowwise",
    },
}
ALONE = "one device"
PLANS: dict[str, dict[str, Any]] = {
    "tp=2": {"devices": 2, "mesh": "tp=2"},
    "tp=3": {"devices": 3, "mesh": "tp=3"},
    "tp=4": {"devices": 4, "mesh": "tp=4"},
    "dp=2 x tp=2": {"devices": 4, "mesh": "dp=2,tp=2"},
    "two stages x tp=2, 1f1b": {"devices": 4, "mesh": "tp=2", "stages": 2},
    "two stages x tp=2, 2bw": {"devices": 4, "mesh": "tp=2", "stages": 2, "schedule": "2bw"},
}


@cache
def model_of(name: str) -> ps.Model:
    torch.manual_seed(0)
    module = Decoder() if name == "gpt" else Images()
    each = BATCH // MICROBATCHES
    example = torch.zeros(each, POSITIONS, dtype=torch.int64) if name == "gpt" else torch.zeros(each, 3, 16, 16)
    return ps.from_torch(module.train(), (example,))


def planned(name: str, asked: Mapping[str, Any], **layouts: object) -> Plan:
    """Plan as asked, split where a mesh is."""
    options = {key: value for key, value in asked.items() if key != "devices"}
    if "mesh" in options:
        options["shard"] = LAYOUTS[name] | layouts
    training = ps.Training(loss="cross_entropy", optimizer=ps.Momentum(lr=0.05), microbatches=MICROBATCHES)
    return ps.plan(model_of(name), ps.Cluster.local(asked["devices"]), training, **options)


def batches(plan: Plan, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    made = []
    for _ in range(count):
        batch = {}
        for value in plan.module.data_inputs:
            shape, dtype = (BATCH, *value.type.dims[1:]), value.type.dtype
            top = VOCABULARY if value.type.rank == 2 else 5
            batch[value.name] = (
                rng.integers(0, top, shape) if dtype == "i64" else rng.standard_normal(shape).astype(np.float32)
            )
        made.append(batch)
    return made


def interpreted(plan: Plan, count: int) -> np.ndarray:
    """Return the losses of steps by the interpreter in float64."""
    run = run_schedule(plan.module, plan.model.imported.weights, batches(plan, count))
    return np.array(run.losses).reshape(count, MICROBATCHES).mean(1)


@cache
def plan_of(name: str, asked: str = ALONE) -> Plan:
    return planned(name, PLANS.get(asked, {"devices": 1}))


def on_one_device(name: str, asked: str, count: int) -> np.ndarray:
    """Return the losses of the whole model. Gradients of 2bw are those of the weights before."""
    return losses_of_recurrence(name, int(PLANS.get(asked, {}).get("schedule") == "2bw"), count)


@cache
def losses_of_recurrence(name: str, delay: int, count: int) -> np.ndarray:
    plan = plan_of(name)
    run = run_recurrence(plan.reference, plan.model.imported.weights, batches(plan, count), delay=delay)
    return np.array(run.losses).reshape(count, MICROBATCHES).mean(1)


def compiled(plan: Plan, folder: Path, count: int, times: int = 1) -> list[list[float]]:
    """Return the losses of so many runs of compiled code."""
    ps.compile(plan, folder)
    runs = []
    for _ in range(times):
        with ps.open(folder) as job:
            runs.append(list(job.run(iter(batches(plan, count)))))
    return runs


def kinds(plan: Plan) -> set[str]:
    return {op.kind for graph in plan.module.graphs.values() for op in graph.ops if op.kind in EXCHANGES}


@pytest.mark.slow
@pytest.mark.parametrize("asked", PLANS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_fifty_steps_have_the_losses_of_one_device(name: str, asked: str, tmp_path: Path) -> None:
    plan = plan_of(name, asked)
    assert kinds(plan)
    first, second = compiled(plan, tmp_path / "bundle", STEPS, times=2)
    assert first == second
    right = on_one_device(name, asked, STEPS)
    np.testing.assert_allclose(first, right, rtol=1e-5)
    assert right[-5:].mean() < right[:5].mean()


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_on_two_devices_have_the_losses_of_one(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, "tp=2")
    first, second = compiled(plan, tmp_path / "bundle", 4, times=2)
    assert first == second
    np.testing.assert_allclose(first, on_one_device(name, "tp=2", 4), rtol=1e-5)


@pytest.mark.parametrize("asked", PLANS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_interpreter_agrees_with_one_device_in_float64(name: str, asked: str) -> None:
    plan = plan_of(name, asked)
    np.testing.assert_allclose(interpreted(plan, 6), on_one_device(name, asked, 6), rtol=1e-10)


def test_the_order_of_collectives_changes_no_bit_of_compiled_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = plan_of("gpt", "tp=2")
    monkeypatch.setattr(pipelines, "_overlap", lambda options: PipelineEntry("overlap", {}, "", wanted=False))
    plain = planned("gpt", PLANS["tp=2"])
    assert ordered.module.graphs["s0.B"].ops != plain.module.graphs["s0.B"].ops
    (losses,) = compiled(ordered, tmp_path / "ordered", 4)
    (others,) = compiled(plain, tmp_path / "plain", 4)
    assert losses == others


@pytest.mark.parametrize("asked", ["tp=2", "tp=3", "tp=4", "two stages x tp=2, 1f1b"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_dropout_draws_what_one_device_draws(name: str, asked: str) -> None:
    parts, whole = drawn(plan_of(name, asked)), drawn(plan_of(name))
    assert parts.keys() == whole.keys()
    assert any(len(ranks) > 1 for ranks in parts.values())
    for key, ranks in parts.items():
        assert np.array_equal(joined(list(ranks.values()), whole[key][0].shape), whole[key][0]), key


def drawn(plan: Plan) -> dict[tuple[int, str], dict[int, np.ndarray]]:
    """Return what is drawn in forwards of one batch, by microbatch, name and rank."""
    seen: dict[tuple[int, str], dict[int, np.ndarray]] = {}

    def watch(rank: int, graph: str, microbatch: int, op: Any, results: tuple[np.ndarray, ...]) -> None:
        if op.kind == "random" and graph.endswith("F"):
            seen.setdefault((microbatch, op.outs[0].name), {})[rank] = results[0]

    watch_ranks(plan.module, plan.model.imported.weights, batches(plan, 1), watch)
    return seen


def joined(parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the parts of all ranks side by side, without padding; those of whole tensors are equal."""
    split = [i for i, (a, b) in enumerate(zip(parts[0].shape, shape, strict=True)) if a != b]
    if not split:
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    (axis,) = split
    return np.concatenate(parts, axis).take(range(shape[axis]), axis)


def test_control_another_sum_has_other_losses() -> None:
    """The control of all comparisons: one sum of partial products becomes the largest of them, on all ranks alike."""
    plan = plan_of("gpt", "tp=2")
    graph = plan.module.graphs["s0.F"]
    place, op = next((i, op) for i, op in enumerate(graph.ops) if op.kind == "all_reduce")
    ops = (*graph.ops[:place], op.with_attrs(by="max"), *graph.ops[place + 1 :])
    wrong = replace(plan, module=plan.module.with_graph(replace(graph, ops=ops)))
    assert np.abs(interpreted(wrong, 3) / on_one_device("gpt", "tp=2", 3) - 1).max() > 1e-4


def test_control_draws_of_a_wrong_place_are_found() -> None:
    """Where ranks draw without their offset, the second half of a mask is the first one again."""
    plan, whole = plan_of("cnn", "tp=2"), drawn(plan_of("cnn"))
    parts = drawn(plan)
    key = next(key for key, ranks in parts.items() if ranks[0].shape != whole[key][0].shape)
    repeated = joined([parts[key][0], parts[key][0]], whole[key][0].shape)
    assert not np.array_equal(repeated, whole[key][0])
