"""Running statistics of batch norms in training, on 1, 2 and 4 stages and under every schedule, against torch with gradient accumulation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock as ps
from penstock.ir.graph import BUFFER, Module, written_vars
from penstock.ir.interpreter.recurrence import InterpretedRun, run_recurrence
from penstock.ir.interpreter.schedules import run_schedule
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.support.errors import UnsupportedModel, UsageError

ROWS, BATCHES, RATE, TIMEOUT = 6, 4, 0.05, 60


class Block(nn.Module):
    def __init__(self, channels: int, momentum: float | None) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels, momentum=momentum),
        )
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    """A small ResNet. One norm keeps a plain average, one is used twice, one is in the mode of inference."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4, momentum=0.3)
        self.one, self.two = Block(4, None), Block(4, 0.1)
        self.stored = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.norm(self.stem(x))))
        return self.head(self.stored(self.two(self.one(x))).mean((2, 3)))


def network() -> Residual:
    torch.manual_seed(5)
    model = Residual().train()
    model.stored.eval()
    nn.init.normal_(model.stored.running_mean)
    return model


def batches(microbatches: int, count: int = BATCHES) -> list[dict[str, np.ndarray]]:
    """The statistics of microbatches differ, so that their order shows."""
    rng = np.random.default_rng(3)
    rows = ROWS * microbatches
    scale = rng.uniform(0.5, 3.0, (count, rows // ROWS, 1, 1, 1, 1))
    drawn = rng.standard_normal((count, rows // ROWS, ROWS, 2, 8, 8)) * scale + scale
    return [{"x": x.reshape(rows, 2, 8, 8).astype(np.float32), "labels": rng.integers(0, 3, rows)} for x in drawn]


def by_torch(microbatches: int, model: Residual) -> dict[str, np.ndarray]:
    """The state dict after plain training with accumulated gradients, in float64."""
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches(microbatches):
        optimizer.zero_grad()
        for k in range(microbatches):
            rows = slice(k * ROWS, (k + 1) * ROWS)
            loss = nn.functional.cross_entropy(
                model(torch.tensor(batch["x"][rows]).double()), torch.tensor(batch["labels"][rows])
            )
            (loss / microbatches).backward()
        optimizer.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


# Stages start at these convolutions.
CUTS: dict[int, tuple[int, ...]] = {1: (), 2: (3,), 4: (1, 2, 4)}


@cache
def imported() -> ps.Model:
    """The network, which plans leave as it is."""
    return ps.from_torch(network(), (torch.zeros(ROWS, 2, 8, 8),))


def planned(stages: int, microbatches: int, schedule: str, recompute: str = "none", **settings: object) -> ps.Plan:
    model = imported()
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=RATE), microbatches=microbatches, **settings)  # type: ignore[arg-type]
    convolutions = [op.loc for op in model.module.graphs["main"].ops if op.kind == "conv"]
    cuts = tuple(convolutions[i] for i in CUTS[stages])
    return ps.plan(
        model, ps.Cluster.local(stages), training, schedule=schedule, stages=stages, split_at=cuts, recompute=recompute
    )


def close(found: dict[str, np.ndarray] | InterpretedRun, expected: dict[str, np.ndarray], rtol: float) -> None:
    variables = found.variables if isinstance(found, InterpretedRun) else found
    for name, array in expected.items():
        if name not in ("stored.num_batches_tracked", "stored.running_mean", "stored.running_var"):
            np.testing.assert_allclose(variables[name], array, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (4, 4)])
def test_one_version_of_the_weights_is_torch(stages: int, microbatches: int) -> None:
    """1f1b and gpipe: parameters and statistics are those of torch with gradient accumulation, whatever the stages."""
    expected = by_torch(microbatches, network())
    assert int(expected["norm.num_batches_tracked"]) == 2 * BATCHES * microbatches
    for schedule in ("1f1b", "gpipe"):
        plan = planned(stages, microbatches, schedule)
        run = run_schedule(plan.module, plan.model.imported.weights, batches(microbatches))
        close(run, expected, 1e-9)
    other = network()
    other.norm.momentum = 0.31
    wrong = by_torch(microbatches, other)
    with pytest.raises(AssertionError, match="running"):  # control: another momentum
        close(run, wrong, 1e-9)
    with pytest.raises(AssertionError, match="running"):  # control: statistics that stay
        close({**run.variables, "two.norm1.running_var": np.ones(4)}, expected, 1e-9)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"),
    [("2bw", 1, 1), ("2bw", 2, 1), ("2bw", 2, 4), ("2bw", 4, 4), ("eager-2bw", 2, 4)],
)
def test_two_versions_are_the_recurrence(schedule: str, stages: int, microbatches: int) -> None:
    plan = planned(stages, microbatches, schedule)
    delay = SCHEDULES[schedule].delay
    weights, data = plan.model.imported.weights, batches(microbatches)
    run, recurrence = (
        run_schedule(plan.module, weights, data),
        run_recurrence(plan.reference, weights, data, delay=delay),
    )
    moving = {name for name, var in plan.module.vars.items() if var.role == BUFFER and not name.startswith("stored")}
    assert len(moving) == 15
    for name in (*moving, "head.weight"):
        np.testing.assert_array_equal(run.variables[name], recurrence.variables[name], err_msg=name)
    plain = run_recurrence(plan.reference, weights, data, delay=0)
    with pytest.raises(AssertionError):  # control: without the delay they are others, because the weights are
        np.testing.assert_allclose(
            run.variables["two.norm2.running_var"], plain.variables["two.norm2.running_var"], rtol=1e-6
        )


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "all"), ("2bw", "all"), ("zb-1f1b", "all"), ("zb-1f1b", "none")]
)
def test_what_backward_computes_again_does_not_move_them_twice(schedule: str, recompute: str) -> None:
    plan, kept = planned(2, 4, schedule, recompute), planned(2, 4, schedule.removeprefix("zb-"))
    weights, data = plan.model.imported.weights, batches(4)
    again = [
        op
        for name, graph in plan.module.graphs.items()
        if name.endswith((".R", ".B"))
        for op in graph.ops
        if "recompute" in op.attrs
    ]
    assert bool(again) == (recompute == "all")
    run, expected = run_schedule(plan.module, weights, data), run_schedule(kept.module, weights, data)
    for name in plan.reference.vars:
        if ".grad" not in name:
            np.testing.assert_allclose(
                run.variables[name], expected.variables[name], rtol=1e-9, atol=1e-12, err_msg=name
            )


def test_every_statistic_is_on_one_stage_and_written_by_its_forward() -> None:
    module = planned(4, 4, "2bw").module
    writers: dict[str, list[str]] = {}
    for graph in module.graphs.values():
        for name in written_vars(graph):
            if module.vars[name].role == BUFFER:
                writers.setdefault(name, []).append(graph.name)
                assert graph.name == f"s{module.vars[name].stage}.F"
    assert len(writers) == 15
    assert all(len(graphs) == 1 for graphs in writers.values())
    assert len({graphs[0] for graphs in writers.values()}) == 4


@pytest.mark.parametrize(
    ("backend", "schedule"), [pytest.param("tvm", "1f1b", marks=pytest.mark.slow), ("numpy", "2bw")]
)
def test_processes_and_a_resume_and_an_export(backend: str, schedule: str, tmp_path: Path) -> None:
    """Real stages in float32, interrupted after two batches; the weights back in torch, which then evaluates with the statistics."""
    microbatches = 4
    data = batches(microbatches)
    plan = planned(2, microbatches, schedule)
    bundle = ps.compile(plan, tmp_path / "bundle", backend=backend)
    with ps.open(bundle, timeout=TIMEOUT) as job:
        list(job.run(data[:2]))
        job.save(tmp_path / "half")
        losses = list(job.run(data[2:]))
        job.save(tmp_path / "whole")
    with ps.open(bundle, timeout=TIMEOUT, resume=tmp_path / "half") as job:
        assert list(job.run(data[2:])) == losses
        job.save(tmp_path / "rest")
    found = {}
    for name in ("whole", "rest"):
        ps.export(bundle, checkpoint=tmp_path / name, safetensors=tmp_path / f"{name}.safetensors")
        found[name] = load_file(tmp_path / f"{name}.safetensors")
    assert all(torch.equal(found["whole"][name], tensor) for name, tensor in found["rest"].items())

    expected = run_recurrence(
        plan.reference, plan.model.imported.weights, data, delay=SCHEDULES[schedule].delay
    ).variables
    arrays = {name: tensor.numpy() for name, tensor in found["whole"].items()}
    close(arrays, {name: expected[name] for name in plan.reference.vars if name in arrays}, 2e-4)
    assert arrays["norm.num_batches_tracked"] == 2 * BATCHES * microbatches
    model, judge = network(), network().double()
    model.load_state_dict(found["whole"])  # strict
    judge.load_state_dict({name: torch.tensor(expected.get(name, arrays[name])) for name in arrays})
    x = torch.tensor(data[0]["x"])
    with torch.no_grad():
        ours, theirs = model.eval()(x), judge.eval()(x.double())
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-3)


def test_statistics_are_float32_where_activations_are_not() -> None:
    """In bf16 a step of momentum 0.1 would be lost: all that is made of a statistic is f32, from sums in f32."""
    plan = planned(2, 2, "1f1b", precision="bf16")
    run = run_schedule(plan.module, plan.model.imported.weights, batches(2), precision="typed")
    wide = planned(2, 2, "1f1b")
    expected = run_schedule(wide.module, wide.model.imported.weights, batches(2))
    for name in ("norm.running_mean", "two.norm2.running_var", "one.norm1.running_mean"):
        np.testing.assert_allclose(run.variables[name], expected.variables[name], rtol=0.05, atol=0.02, err_msg=name)
    forward = [op for graph in plan.module.graphs.values() if graph.name.endswith(".F") for op in graph.ops]
    makers = {v: op for op in forward for v in op.outs}
    for op in forward:
        if op.kind == "write" and op.ins[0].type.dtype == "f32":
            assert all(v.type.dtype == "f32" for v in makers[op.ins[0]].ins)
            assert all(v not in makers or makers[v].kind != "cast" for v in makers[op.ins[0]].ins)


class Whitened(nn.Module):
    """Takes the running mean off before it moves it, so that results depend on the order of microbatches."""

    def __init__(self, leaves: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.leaves = nn.Linear(3, 5), nn.Linear(5, 2), leaves
        self.register_buffer("centre", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        centred = h - self.centre
        with torch.no_grad():
            self.centre.lerp_(h.mean(0), 0.25)
        return self.last(torch.tanh(h if self.leaves else centred))


def test_results_may_depend_on_a_buffer_that_moves() -> None:
    torch.manual_seed(1)
    module = Whitened()
    model = ps.from_torch(module, (torch.zeros(4, 3),))
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=3)
    rng = np.random.default_rng(0)
    data = [
        {
            "x": rng.standard_normal((12, 3)).astype(np.float32),
            "labels": rng.standard_normal((12, 2)).astype(np.float32),
        }
        for _ in range(3)
    ]
    plan = ps.plan(model, ps.Cluster.local(2), training, stages=2)
    run = run_schedule(plan.module, model.imported.weights, data)
    module = module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        for k in range(3):
            x, labels = (torch.tensor(batch[name][4 * k : 4 * k + 4]).double() for name in ("x", "labels"))
            (nn.functional.mse_loss(module(x), labels) / 3).backward()
        optimizer.step()
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose(run.variables[name], tensor.numpy(), rtol=1e-12, err_msg=name)
    with pytest.raises(UnsupportedModel, match="outputs depend on @centre, which forward changes"):
        ps.plan(model, ps.Cluster.local(1))


def test_without_training_nothing_moves() -> None:
    """Of a module in training mode an inference bundle takes the statistics of the batch, as before; of one in eval() the stored ones."""
    for mode in (True, False):
        model = ps.from_torch(network().train(mode), (torch.zeros(ROWS, 2, 8, 8),))
        module: Module = ps.plan(model, ps.Cluster.local(2)).module
        assert not any(op.kind == "write" for graph in module.graphs.values() for op in graph.ops)
        assert ("two.norm1.running_mean" in module.vars) is False
    kept = ps.from_torch(Whitened(leaves=True), (torch.zeros(4, 3),))
    assert "centre" in kept.module.vars
    assert "centre" not in ps.plan(kept, ps.Cluster.local(1)).module.vars


def test_a_cut_between_the_read_and_the_write_of_a_statistic() -> None:
    """The search leaves such places out; asked for by name, they are refused."""
    model = ps.from_torch(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (torch.zeros(5, 3),))
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1))
    main = model.module.graphs["main"]
    value = next(op.ins[0].name for op in main.ops if op.kind == "write" and op.var == "1.running_mean")
    with pytest.raises(UsageError, match=r"@1\.running_mean is read, and behind it written"):
        ps.plan(model, ps.Cluster.local(2), training, split_at=(value,))
    assert (
        ps.plan(model, ps.Cluster.local(2), training, split_at=("2/linear_1",)).module.vars["1.running_mean"].stage == 0
    )
