"""Variables over replicas, by `zero`: levels of it train as level 0 does, with the bytes that formulas say.

The judge is the interpreter, all ranks in lockstep. Level 0 sums gradients by `AR`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.ir.collective_calls import calls_of, kept_parts, sent_bytes
from penstock.ir.graph import GRAD, NORM, PARAM, STATE, Module
from penstock.ir.interpreter.recurrence import InterpretedRun
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.memory.workspace import planned_blocks
from penstock.ir.ops import make
from penstock.ir.schedule import Program, Schedule
from penstock.ir.verify.verifier import check
from penstock.support.errors import UsageError

STEPS, BATCH, WIDTH = 3, 4, 8


@cache
def model() -> ps.Model:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))
    return ps.from_torch(layers, (torch.randn(BATCH, WIDTH),))


@cache
def planned(
    level: int,
    mesh: str = "dp=2",
    stages: int = 1,
    schedule: str = "1f1b",
    count: int = 4,
    clip: float = 0.0,
    precision: str = "f32",
) -> Module:
    devices = stages * int(np.prod([int(part.partition("=")[2]) for part in mesh.split(",")]))
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), count, clip=clip, precision=precision)
    shard = ("preset:megatron",) if "tp" in mesh else ()
    return ps.plan(
        model(),
        ps.Cluster.local(devices),
        training,
        mesh=mesh,
        shard=shard,
        stages=stages,
        schedule=schedule,
        zero=level,
    ).module


def trained(module: Module, steps: int = STEPS) -> InterpretedRun:
    rng = np.random.default_rng(1)
    image, labels = module.data_inputs
    assert module.schedule is not None
    samples = module.schedule.microbatches * image.type.dims[0]
    batches = [
        {image.name: rng.normal(size=(samples, WIDTH)), labels.name: rng.integers(0, 4, samples)} for _ in range(steps)
    ]
    weights = {name: np.asarray(x) for name, x in model().imported.weights.items()}
    return run_schedule(module, weights, batches)


def same_losses(module: Module, other: Module, steps: int = STEPS) -> bool:
    mine, theirs = (trained(m, steps).losses for m in (module, other))
    return list(mine) == list(theirs)


def bytes_of(module: Module, role: str) -> int:
    return sum(
        module.local_type(v.type, v.stage or 0).nbytes for v in module.vars.values() if v.role == role and v.type.rank
    )


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_level_one_is_level_zero_to_the_last_bit(schedule: str, stages: int) -> None:
    plain, split = (planned(level, stages=stages, schedule=schedule) for level in (0, 1))
    check(split, split.facts)
    assert same_losses(split, plain)


def moved(module: Module) -> int:
    """Return the bytes that a rank sends in collectives of a batch, and in its AR."""
    counts = {"F": 1, "B": 1, "W": 1, "U": 1, "N": 1, "P": 1}
    replicas = module.mesh_of(0).sizes["dp"]
    return sum(
        sent_bytes(call.op, replicas) * counts[name.rpartition(".")[2]]
        for name, graph in module.graphs.items()
        for call in (*calls_of(graph), *(kept_parts(module, 0) if name == "s0.U" else ()))
    )


@pytest.mark.parametrize("replicas", [2, 4])
def test_bytes_are_those_of_the_formulas(replicas: int) -> None:
    plain = planned(0, f"dp={replicas}", count=replicas)
    one, two, three = (planned(level, f"dp={replicas}", count=replicas) for level in (1, 2, 3))
    whole = bytes_of(plain, PARAM)
    assert [bytes_of(m, STATE) * replicas for m in (one, two, three)] == [2 * whole] * 3
    assert [bytes_of(m, GRAD) * n for m, n in ((one, 1), (two, replicas), (three, replicas))] == [whole] * 3
    assert [bytes_of(m, PARAM) * n for m, n in ((one, 1), (two, 1), (three, replicas))] == [whole] * 3
    assert moved(one) * replicas == moved(two) * replicas == 2 * whole * (replicas - 1)
    # A bias is not read in the backward graph, and is gathered once.
    backward = {op.var for op in three.graphs["s0.B"].ops if op.kind == "read"}
    again = sum(three.vars[name].type.nbytes for name in backward)
    assert moved(three) * replicas == (2 * whole + again) * (replicas - 1)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(("replicas", "steps"), [(2, STEPS), (4, 50)])
def test_every_level_is_level_zero_with_a_microbatch_each(level: int, replicas: int, steps: int) -> None:
    plain, split = (planned(n, f"dp={replicas}", count=replicas) for n in (0, level))
    check(split, split.facts)
    assert same_losses(split, plain, steps)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_levels_with_stages_and_tensors_split_besides(level: int, schedule: str) -> None:
    plain, split = (planned(n, "dp=2,tp=2", 2, schedule) for n in (0, level))
    check(split, split.facts)
    mine, theirs = (trained(m).losses for m in (split, plain))
    np.testing.assert_allclose(mine, theirs, rtol=1e-12)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "dp=3"])
def test_norms_count_every_part_once(level: int, mesh: str) -> None:
    stages, count = (1, 3) if mesh == "dp=3" else (2, 4)
    plain, split = (planned(n, mesh, stages, count=count, clip=0.1) for n in (0, level))
    check(split, split.facts)
    held = [[sum(v.type.nbytes for v in m.vars.values() if "dp" in str(v.type)) for m in (split, plain)]]
    assert held[0][0] > held[0][1]
    np.testing.assert_allclose(trained(split).losses, trained(plain).losses, rtol=1e-12)
    norms = [[values[NORM] for _, values in sorted(trained(m).handed_out.items())] for m in (split, plain)]
    np.testing.assert_allclose(*norms, rtol=1e-12)
    assert min(norms[0]) > 0.1, "nothing is clipped"


def test_squares_of_other_replicas_are_missed() -> None:
    module = planned(1, clip=0.1)
    graph = module.graphs["s0.N"]
    (total,) = [op for op in graph.ops if op.kind == "all_reduce"]
    own = make("add", (*total.ins, *total.ins), [total.outs[0].name])
    spoilt = module.with_graph(replace(graph, ops=tuple(own if op is total else op for op in graph.ops)))
    wrong, right = (trained(m).handed_out[0][NORM] for m in (spoilt, planned(0, clip=0.1)))
    assert abs(wrong - right) > 1e-3 * right


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_loss_scale_keeps_parts(schedule: str) -> None:
    whole, parts = [], []
    for level in (0, 1, 2, 3):
        module = planned(level, schedule=schedule, stages=2, precision="f16")
        (whole if level == 0 else parts).append(trained(module).losses)
        assert any(
            "+dp" in str(v.type) or "/dp" in str(v.type) for v in module.vars.values() if v.role == GRAD
        ) == bool(level)
    for losses in parts:
        np.testing.assert_allclose(losses, whole[0], rtol=1e-12)


def test_parts_of_dimensions_that_do_not_divide_are_padded() -> None:
    plain, split = (planned(level, "dp=3", count=3) for level in (0, 1))
    assert any(v.type.axes and v.type.dims[0] % 3 for v in split.vars.values())
    assert same_losses(split, plain)


def with_parts_swapped(module: Module) -> Module:
    """Return the program in which new weights are gathered of parts that lie one rank further."""
    graph = module.graphs["s0.U"]
    at = next(i for i, op in enumerate(graph.ops) if op.kind == "all_gather")
    shift = make("shift", graph.ops[at].ins, ["moved"], by=1, over="dp")
    gather = graph.ops[at].with_ins(shift.outs)
    return module.with_graph(replace(graph, ops=(*graph.ops[:at], shift, gather, *graph.ops[at + 1 :])))


def with_another_part(module: Module) -> Module:
    """Return the program in which the update takes a part of a sum that AR leaves to another rank."""
    graph = module.graphs["s0.U"]
    at = next(i for i, op in enumerate(graph.ops) if op.kind == "gather" and "total" in op.ins[0].name)
    first = make("const", (), ["first"], value=0, dtype="i64")
    gather = graph.ops[at].with_ins((graph.ops[at].ins[0], first.outs[0]))
    return module.with_graph(replace(graph, ops=(*graph.ops[:at], first, gather, *graph.ops[at + 1 :])))


def without_sum(module: Module) -> Module:
    """Return the program without AR, in which ranks take their own gradients."""
    assert module.schedule is not None
    ranks = {
        rank: Program(program.start, tuple(a for a in program.batch if a.kind != "AR"))
        for rank, program in module.schedule.ranks.items()
    }
    return module.but(schedule=Schedule(module.schedule.name, module.schedule.microbatches, ranks))


@pytest.mark.parametrize("spoil", [with_parts_swapped, with_another_part, without_sum])
def test_a_wrong_part_and_a_dropped_sum_are_seen(spoil: Callable[[Module], Module]) -> None:
    assert not same_losses(spoil(planned(1)), planned(0))


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="there are none"):
        ps.plan(model(), ps.Cluster.local(2), ps.Training("cross_entropy"), zero=1)
    with pytest.raises(UsageError, match="training holds"):
        ps.plan(model(), ps.Cluster.local(2), mesh="dp=2", zero=1)


def test_products_of_an_update_keep_their_matrices_whole() -> None:
    training = ps.Training("cross_entropy", ps.Muon(lr=1e-2), 2)
    plan = ps.plan(model(), ps.Cluster.local(2), training, mesh="dp=2", zero=1)
    laid = {name: var.type for name, var in plan.module.vars.items()}
    assert any(t.is_plain for name, t in laid.items() if name.endswith(".muon"))
    assert any("whole tensors" in note.text for note in plan.module.notes if note.origin == "zero")
    check(plan.module, plan.module.facts)


class Tied(nn.Module):
    """A table that is looked up in the first stage and multiplied by in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.inner(self.table(x))))
        return logits


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_tied_weights_of_two_stages_stay_whole_and_all_else_is_split(schedule: str) -> None:
    torch.manual_seed(0)
    tied = ps.from_torch(Tied(), (torch.zeros(4, dtype=torch.long),))
    rng, training = np.random.default_rng(0), ps.Training("cross_entropy", ps.AdamW(lr=1e-2), 4)
    samples = [[rng.integers(0, 12, 16) for _ in range(2)] for _ in range(STEPS)]
    losses, modules = [], []
    for level in (0, 1):
        module = ps.plan(
            tied, ps.Cluster.local(4), training, mesh="dp=2", split_at=["tanh"], schedule=schedule, zero=level
        ).module
        names = [value.name for value in module.data_inputs]
        weights = {name: np.asarray(x) for name, x in tied.imported.weights.items()}
        losses.append(run_schedule(module, weights, [dict(zip(names, x, strict=True)) for x in samples]).losses)
        modules.append(module)
    assert "s0.P" in modules[1].graphs
    assert losses[0] == losses[1]
    assert 1 < bytes_of(modules[0], STATE) / bytes_of(modules[1], STATE) < 2


@pytest.mark.parametrize("level", [1, 3])
def test_losses_are_those_of_torch(level: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))
    layers.double()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    rng, right = np.random.default_rng(1), []
    for _ in range(STEPS):
        x, y = torch.tensor(rng.normal(size=(4 * BATCH, WIDTH))), torch.tensor(rng.integers(0, 4, 4 * BATCH))
        loss = nn.functional.cross_entropy(layers(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append(loss.item())
    mine = np.array(trained(planned(level)).losses).reshape(STEPS, 4).mean(1)
    np.testing.assert_allclose(mine, right, rtol=1e-5)
    assert abs(right[0] - right[-1]) > 1e-3


def test_own_parts_of_weights_are_not_all_there_at_once() -> None:
    """Temporaries of an update are those of a few parameters, however many there are."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    deep = ps.from_torch(layers, (torch.randn(BATCH, 16),))
    training = ps.Training("mse", ps.AdamW(lr=1e-2), 2)
    update = ps.plan(deep, ps.Cluster.local(2), training, mesh="dp=2", stages=1, zero=1).module.graphs["s0.U"]
    whole = 16 * 16 * 4
    assert sum(planned_blocks(update)) <= 3 * whole
    # The control: updates wait for a kernel that ends at the end of the graph.
    numbers = [op for op in update.ops if op.kind == "write" and not op.ins[0].type.rank]
    assert numbers
    late = replace(update, ops=(*(op for op in update.ops if op not in numbers), *numbers))
    assert sum(planned_blocks(late)) >= 4 * whole


def sums_before_updates(module: Module) -> list[str]:
    """Return the sums that stand right in front of the update of an earlier batch."""
    assert module.schedule is not None
    pairs = [pair for program in module.schedule.ranks.values() for pair in pairwise(program.batch)]
    return [f"{one} {other}" for one, other in pairs if (one.kind, other.kind) == ("AR", "U") and other.mb < one.mb]


def test_updates_of_earlier_batches_come_before_sums() -> None:
    """What they gather would share the link with the sum. The control is level 0, whose updates gather nothing."""

    def cut_in_two(level: int) -> Module:
        second = [op for op in model().module.graphs["main"].ops if op.kind == "matmul"][1].outs[0].name
        training = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), 4)
        settings = {"split_at": (second,), "schedule": "2bw", "replicas": 2, "zero": level}
        return ps.plan(model(), ps.Cluster.local(4), training, stages=2, **settings).module

    before, after = cut_in_two(0), cut_in_two(1)
    assert sums_before_updates(before)
    assert not sums_before_updates(after)
    check(after, ("scheduled", "wired"))
    assert same_losses(after, before)
