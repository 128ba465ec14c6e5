"""Tests of recomputation: it changes the saved values, never the results, bit for bit in the interpreter. It computes
no more again than a budget needs."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.ir.cluster.cluster import Link
from penstock.ir.graph import Module, Op
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.liveness import from_state_alone
from penstock.ir.memory.predict import measure_memory
from penstock.ir.ops import OPS
from penstock.ir.verify.verifier import verify
from penstock.models import write_gpt
from penstock.passes.costs.prices import op_seconds
from penstock.passes.memory.recompute import RecomputeOptions, recompute
from penstock.passes.memory.repeated import DRAWS, may_repeat, repeat
from penstock.support.errors import DoesNotFit, UsageError, VerifyError
from penstock.support.words import shown_bytes

GPT = {"layers": 4, "width": 16, "heads": 2, "vocab": 24, "positions": 6}
MICROBATCHES = 4
UNLIMITED = 1 << 40


class Noisy(nn.Module):
    """Dropout on activations and batch norms with running statistics, in every half."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))
        self.head, self.dropout = nn.Linear(8, 3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(torch.tanh(norm(layer(self.dropout(x)))))
        return self.head(x)


def gpt(folder: Path) -> ps.Model:
    return ps.from_onnx(write_gpt(folder / "gpt.onnx", **GPT, seed=1), dims={"batch": 2})


def noisy(folder: Path) -> ps.Model:
    torch.manual_seed(3)
    return ps.from_torch(Noisy().train(), (torch.zeros(4, 8),))


MODELS = {"gpt": gpt, "noisy": noisy}


def cluster(stages: int, memory: int = UNLIMITED) -> ps.Cluster:
    """Links that cost nothing, so that small models are cut evenly."""
    devices = tuple(replace(device, spaces=(("ram", memory),)) for device in ps.Cluster.local(stages).devices)
    return ps.Cluster(devices, tuple(Link(a.name, b.name, 1e15, 1e-12) for a, b in pairwise(devices)))


class Plans:
    """Plans of the models, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, ps.Model] = {}
        self.made: dict[tuple[str, int, str, str, int], ps.Plan] = {}

    def model(self, name: str) -> ps.Model:
        if name not in self.models:
            self.models[name] = MODELS[name](self.folder)
        return self.models[name]

    def __call__(self, name: str, stages: int, schedule: str, mode: str, memory: int = UNLIMITED) -> ps.Plan:
        key = (name, stages, schedule, mode, memory)
        if key not in self.made:
            self.made[key] = self._plan(*key)
        return self.made[key]

    def _plan(self, name: str, stages: int, schedule: str, mode: str, memory: int) -> ps.Plan:
        """Cut as without limits, whatever the memory: other cuts could make recomputation unnecessary."""
        training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=0.01), microbatches=MICROBATCHES)
        cuts: list[str] = []
        if memory != UNLIMITED:
            free = self(name, stages, schedule, "none").module
            starts = [
                note.text.rpartition(" ")[2]
                for note in free.notes
                if note.origin == "partition" and " starts at " in note.text
            ]
            cuts = starts[1:]
        return ps.plan(
            self.model(name), cluster(stages, memory), training, schedule=schedule, recompute=mode, split_at=cuts
        )


def batches(plan: ps.Plan, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        shapes = {v: (v.type.dims[0] * MICROBATCHES, *v.type.dims[1:]) for v in plan.module.data_inputs}
        arrays = {
            v.name: rng.integers(0, 3, s) if v.type.dtype == "i64" else rng.standard_normal(s).astype("f")
            for v, s in shapes.items()
        }
        found.append(arrays)
    return found


def peaks(plan: ps.Plan) -> dict[int, int]:
    return {rank: memory.peak for rank, memory in measure_memory(plan.module).items()}


def copies(module: Module) -> list[Op]:
    return [op for graph in module.graphs.values() for op in graph.ops if "recompute" in op.attrs]


def between(low: int, high: int, part: float) -> int:
    return int(low + (high - low) * part)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    return Plans(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("stages", "schedule"), [(2, "1f1b"), (2, "2bw"), (4, "1f1b"), (4, "2bw"), (2, "gpipe"), (2, "eager-2bw")]
)
def test_training_is_the_same_bit_for_bit(planned: Plans, model: str, stages: int, schedule: str) -> None:
    whole, everything = (planned(model, stages, schedule, mode) for mode in ("none", "all"))
    budget = between(max(peaks(everything).values()), max(peaks(whole).values()), 0.5)
    some = planned(model, stages, schedule, "auto", max(budget, *peaks(everything).values()))
    weights, data = planned.model(model).imported.weights, batches(whole, 3)
    expected = run_schedule(whole.module, weights, data, precision=TYPED)
    assert not copies(whole.module)
    for plan in (everything, some):
        assert copies(plan.module) or plan is some
        found = run_schedule(plan.module, weights, data, precision=TYPED)
        assert found.losses == expected.losses
        assert found.variables.keys() == expected.variables.keys()
        for name, array in expected.variables.items():
            assert np.array_equal(array, found.variables[name]), name


def test_a_copy_that_reads_other_weights_is_noticed(planned: Plans) -> None:
    """Control: under 2bw the weights of a backward pass are not the newest, and the comparison above tells which of them copies read."""
    plan = planned("gpt", 2, "2bw", "all")

    def latest(op: Op) -> Op:
        return op.with_attrs(version="latest") if op.kind == "read" and "recompute" in op.attrs else op

    graphs = {name: replace(graph, ops=tuple(map(latest, graph.ops))) for name, graph in plan.module.graphs.items()}
    wrong = plan.module.but(graphs=graphs)
    weights, data = plan.model.imported.weights, batches(plan, 5)
    assert wrong.graphs != plan.module.graphs
    assert run_schedule(plan.module, weights, data).losses != run_schedule(wrong, weights, data).losses


def test_draws_and_statistics_are_never_done_again(planned: Plans) -> None:
    module = planned("noisy", 2, "1f1b", "all").module
    forward, backward = (
        [graph.ops for name, graph in module.graphs.items() if name.endswith(kind)] for kind in (".F", ".B")
    )
    done = [op.kind for ops in forward for op in ops]
    again = [op.kind for op in copies(module)]
    assert {"random", "write"} <= set(done)
    assert again
    assert not {*DRAWS, "write"}.intersection(again)
    assert not {*DRAWS, "write"}.intersection(op.kind for ops in backward for op in ops)
    assert not any(OPS[kind].effect and kind != "read" for kind in again)


def test_all_keeps_inputs_and_draws_only(planned: Plans, model: str) -> None:
    """But for the last stage, where nothing waits for its backward."""
    module = planned(model, 4, "1f1b", "all").module
    for index in range(3):
        forward = module.stage_graph(index, "F")
        assert forward is not None
        makers = forward.producers()
        assert all(v not in makers or makers[v].kind in DRAWS for v in forward.saved)
    assert module.stage_graph(3, "R") is None
    assert {op.attrs["of"] for op in copies(module)}.isdisjoint(v.name for v in module.graphs["s3.B"].ins)


def test_copies_stand_right_before_their_first_use(planned: Plans, model: str) -> None:
    """Nothing but other forward operations stands between a copy and the first operation that takes it."""
    module = planned(model, 2, "1f1b", "none").module
    for stage in module.stages:
        forward, backward = (module.stage_graph(stage.index, kind) for kind in "FB")
        assert forward is not None
        assert backward is not None
        safe, taken = may_repeat(forward), from_state_alone(forward)
        dropped = [op for op in forward.ops if safe(op) and not taken.issuperset(op.outs)]
        backward = repeat(
            forward, backward, [op for op in dropped if not set(op.outs).isdisjoint(forward.saved)]
        ).backward
        ours = {v for op in forward.ops for v in op.outs}
        for i, op in enumerate(backward.ops):
            if "recompute" in op.attrs:
                first = next(j for j, other in enumerate(backward.ops) if not set(other.ins).isdisjoint(op.outs))
                assert all(ours.issuperset(other.outs) for other in backward.ops[i:first])


def test_a_stage_that_fits_is_left_alone(planned: Plans, model: str) -> None:
    plenty = UNLIMITED - 1
    whole = planned(model, 2, "1f1b", "none", plenty)
    found = planned(model, 2, "1f1b", "auto", max(peaks(whole).values()))
    assert found.module.graphs == whole.module.graphs
    assert not [note for note in found.module.notes if note.origin == "recompute"]
    assert planned(model, 2, "1f1b", "auto", plenty).module.graphs == whole.module.graphs


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 0.95])
def test_a_budget_is_met_with_the_time_it_takes(planned: Plans, part: float) -> None:
    low, high = (peaks(planned("gpt", 2, "2bw", mode))[0] for mode in ("all", "none"))
    budget = between(low, high, part)
    plan, plain = planned("gpt", 2, "2bw", "auto", budget), planned("gpt", 2, "2bw", "none").module
    assert peaks(plan)[0] <= budget < high
    notes = [note.text for note in plan.module.notes if note.origin == "recompute"]
    assert notes[0].startswith("stage 0 on cpu:0 computes again in the backward pass: ")
    assert (
        f"predicted peak {shown_bytes(peaks(plan)[0])} instead of {shown_bytes(high)}, budget {shown_bytes(budget)}"
        in notes[0]
    )
    assert seconds_of(plan.module, plain) < seconds_of(planned("gpt", 2, "2bw", "all").module, plain)


def test_more_memory_never_takes_more_time(planned: Plans) -> None:
    low, high = (max(peaks(planned("gpt", 2, "gpipe", mode)).values()) for mode in ("all", "none"))
    plain = planned("gpt", 2, "gpipe", "none").module
    spent = [seconds_of(planned("gpt", 2, "gpipe", "auto", between(low, high, i / 3)).module, plain) for i in range(4)]
    assert spent == sorted(spent, reverse=True)
    assert spent[-1] == 0 < spent[0]


def seconds_of(module: Module, plain: Module) -> float:
    """What copies cost: as the operations that they are copies of, in a module that does nothing twice."""
    (device,) = cluster(1).devices
    forward = [graph for name, graph in plain.graphs.items() if name.endswith(".F")]
    price = {
        op.outs[0]: s
        for graph in forward
        for op, s in zip(graph.ops, op_seconds(graph, device), strict=True)
        if op.outs
    }
    return sum(price[op.outs[0]] for op in copies(module))


def test_what_fits_nowhere_is_refused_with_the_best_that_there_is(planned: Plans) -> None:
    with pytest.raises(
        DoesNotFit,
        match=r"stage 0 on cpu:0 needs .* \(\d+ bytes\) .* operations are done again; it has 8\.8 KiB \(9000 bytes\)",
    ) as caught:
        planned("gpt", 2, "1f1b", "auto", 9000)
    assert caught.value.exit_code == 4
    assert re.search(r"\n    weights .*, gradients .*, activations .*, workspace ", caught.value.what)
    with pytest.raises(DoesNotFit, match=r"it has 8\.8 KiB \(9000 bytes\)"):
        planned("gpt", 2, "1f1b", "none", 9000)


def test_a_budget_may_be_given_beside_that_of_devices(planned: Plans) -> None:
    plan = planned("gpt", 2, "1f1b", "none")
    wired = plan.module.but(schedule=plan.module.schedule.rewrite(lambda a: () if a.kind == "D" else (a,)), facts=())  # type: ignore[union-attr]
    high = max(peaks(plan).values())
    found = recompute(wired, RecomputeOptions(budget=int(high * 0.95)))
    assert copies(found)
    assert recompute(wired, RecomputeOptions(budget=high)) is wired
    assert recompute(wired, RecomputeOptions(mode="none", budget=1)) is wired
    with pytest.raises(UsageError, match="unknown mode"):
        recompute(wired, RecomputeOptions(mode="some"))


def test_the_schedule_comes_first(toy) -> None:
    with pytest.raises(UsageError, match="no schedule"):
        recompute(toy(2))


def test_a_value_that_is_neither_saved_nor_made_is_found_by_the_verifier(planned: Plans) -> None:
    """Control: the verifier does not trust the pass."""
    module = planned("gpt", 2, "1f1b", "all").module
    again = module.graphs["s0.R"]
    gone = next(op for op in again.ops if op.outs[0] in again.saved)
    with pytest.raises(VerifyError, match=f"%{gone.outs[0].name}"):
        verify(module.with_graph(replace(again, ops=tuple(op for op in again.ops if op is not gone))))


def test_one_operation_alone(planned: Plans) -> None:
    """By hand: a gelu is done again from what its gradient takes anyway, so that one value less is saved and nothing more."""
    module = planned("gpt", 2, "1f1b", "none").module
    forward, backward = module.graphs["s0.F"], module.graphs["s0.B"]
    gelu = next(op for op in forward.ops if op.kind == "gelu")
    made = repeat(forward, backward, [gelu])
    assert set(forward.saved) - set(made.forward.saved) == set(gelu.outs)
    assert set(made.forward.saved) <= set(forward.saved)
    assert [op.kind for op in made.copies] == ["gelu"]
    assert made.backward.ins == tuple(v for v in backward.ins if v not in gelu.outs)
