"""Clipping, skipping and loss scales: against torch on one device, and on several stages against the module before it was cut."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.grid import time_per_batch
from penstock.ir.interpreter.recurrence import InterpretedRun, run_recurrence
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.ops import make
from penstock.ir.schedule import Program, Schedule
from penstock.ir.types import TensorType
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import Call, run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.passes.training.autodiff import LOSS_SCALE, AutodiffOptions, autodiff
from penstock.passes.training.guard import GuardOptions, guard
from penstock.passes.training.optimizer import OptimizerOptions, optimizer
from penstock.support.errors import UsageError, VerifyError

WIDTHS, ROWS, M = [6, 8, 8, 8, 5], 3, 4
Arrays = dict[str, np.ndarray]


def network(widths: list[int] = WIDTHS, *, tied: bool = False) -> Module:
    """Layers with tanh, and a mean-square loss; `tied` ones of one shape are one parameter."""
    x, labels = (Value(n, TensorType("f32", (ROWS, w))) for n, w in (("x", widths[0]), ("labels", widths[-1])))
    ops: list[Op] = []
    vars: dict[str, Var] = {}
    value = x
    for i, (a, b) in enumerate(pairwise(widths)):
        name = "shared" if tied and a == b else f"w{i}"
        weight = Value(f"w{i}.value", TensorType("f32", (a, b)))
        vars[name] = Var(name, weight.type, "param")
        ops.append(Op("read", (), (weight,), {"var": name}))
        ops.append(make("matmul", (value, weight), [f"h{i}"], f"layer{i}"))
        ops.append(make("tanh", ops[-1].outs, [f"a{i}"]))
        value = ops[-1].outs[0]
    ops.append(make("mse", (value, labels), ["loss"]))
    return Module(
        "net", (x, labels), ("loss",), vars=vars, graphs={"main": Graph("main", (x, labels), ops[-1].outs, tuple(ops))}
    )


def weights_of(module: Module) -> Arrays:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(var.type.dims) for name, var in module.vars.items()}


def batches_of(count: int, spoiled: int | None = None) -> list[Arrays]:
    """Batches of noise; that of number `spoiled` has one infinite element in its second microbatch."""
    rng = np.random.default_rng(2)
    found = [
        {"x": rng.standard_normal((ROWS * M, WIDTHS[0])), "labels": 3 * rng.standard_normal((ROWS * M, WIDTHS[-1]))}
        for _ in range(count)
    ]
    if spoiled is not None:
        found[spoiled]["labels"][ROWS + 1, 2] = np.inf
    return found


def by_torch(
    start: Arrays, batches: list[Arrays], delay: int, clip: float, make_optimizer
) -> tuple[list[float], Arrays, list[float]]:
    """Losses, last weights and norms of plain training, the gradient `delay` updates late, without the updates that are not finite."""
    now = {n: torch.tensor(w, dtype=torch.float64).requires_grad_() for n, w in start.items()}
    update = make_optimizer(list(now.values()))
    before, losses, norms = {n: w.detach().clone() for n, w in now.items()}, [], []
    for batch in batches:
        used = now if not delay else {n: w.clone().requires_grad_() for n, w in before.items()}
        before = {n: w.detach().clone() for n, w in now.items()}
        x, labels = torch.tensor(batch["x"]), torch.tensor(batch["labels"])
        for part, wanted in zip(x.chunk(M), labels.chunk(M), strict=True):
            for weight in used.values():
                part = torch.tanh(part @ weight)
            loss = torch.nn.functional.mse_loss(part, wanted)
            losses.append(loss.item())
            (loss / M).backward()
        for name, weight in now.items():
            weight.grad = used[name].grad
        norm = torch.nn.utils.clip_grad_norm_(now.values(), clip or float("inf"))
        norms.append(norm.item())
        if torch.isfinite(norm):
            update.step()
        update.zero_grad()
    return losses, {n: w.detach().numpy() for n, w in now.items()}, norms


def staged(
    module: Module, stages: int, schedule: str, options: dict | None, kind: str = "adamw"
) -> tuple[Module, Module]:
    """The program of every rank, and the module before it was cut."""
    seen: list[Module] = []

    def remember(call: Call, before: Module) -> Call:
        if call.name == "partition":
            seen.append(before)
        return call

    cuts = {2: ("layer2",), 4: ("layer1", "layer2", "layer3")}.get(stages, ())
    calls = training_pipeline(
        {"kind": kind, "lr": 0.03},
        {"stages": stages, "split_at": cuts},
        PipelineOptions(schedule=schedule, microbatches=M, guard=options),
    )
    return run_passes(module.but(cluster=Cluster.local(stages)), calls, PASSES, before=remember), seen[0]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_clipping_and_skipping_are_those_of_torch(clip: float, delay: int) -> None:
    module = network()
    start, batches = weights_of(module), batches_of(24, spoiled=17)
    guarded = guard(
        optimizer(autodiff(module, AutodiffOptions(M)), OptimizerOptions(kind="adamw", lr=0.03, weight_decay=0.0)),
        GuardOptions(clip),
    )
    found = run_recurrence(guarded, start, batches, delay=delay)
    losses, last, norms = by_torch(
        start, batches, delay, clip, lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.0)
    )
    assert not np.isfinite(norms[17])
    assert max(n for i, n in enumerate(norms) if i != 17) > 0.5
    np.testing.assert_allclose(found.losses, losses, rtol=1e-9)
    for name, array in last.items():
        np.testing.assert_allclose(found.variables[name], array, rtol=1e-9)
    np.testing.assert_allclose(
        [float(found.handed_out[t]["gradient.norm"]) for t in range(24) if t != 17],
        [n for i, n in enumerate(norms) if i != 17],
        rtol=1e-9,
    )
    # Controls: another limit, and no guard at all.
    other = run_recurrence(
        guard(
            optimizer(autodiff(module, AutodiffOptions(M)), OptimizerOptions(kind="adamw", lr=0.03)), GuardOptions(0.2)
        ),
        start,
        batches,
    )
    assert not np.allclose(other.losses[-1], losses[-1], rtol=1e-6)
    bare = run_recurrence(
        optimizer(autodiff(module, AutodiffOptions(M)), OptimizerOptions(kind="adamw", lr=0.03)),
        start,
        batches,
        delay=delay,
    )
    assert not np.isfinite(bare.losses[-1])


def run_staged(
    module: Module, stages: int, schedule: str, spoiled: int | None, options: dict
) -> tuple[InterpretedRun, InterpretedRun, Module]:
    program, whole = staged(module, stages, schedule, options)
    start, batches = weights_of(module), batches_of(10, spoiled)
    delay = 0 if schedule in ("1f1b", "gpipe", "zb-1f1b") else 1
    return run_schedule(program, start, batches), run_recurrence(whole, start, batches, delay=delay), program


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("stages", "schedule"),
    [(1, "2bw"), (2, "1f1b"), (2, "2bw"), (4, "gpipe"), (4, "2bw"), (2, "eager-2bw"), (4, "zb-1f1b")],
)
def test_stages_clip_and_skip_as_one(stages: int, schedule: str, tied: bool) -> None:
    found, expected, program = run_staged(network(tied=tied), stages, schedule, 7, {"clip": 0.5})
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    for name, array in expected.variables.items():
        np.testing.assert_allclose(found.variables[name], array, rtol=1e-12, atol=1e-12, err_msg=name)
    assert np.isfinite(found.losses[-1])
    # Nobody waits: updates that need what others hand out come late where weights have versions.
    delayed = schedule in ("2bw", "eager-2bw")
    assert program.schedule is not None
    grads = {var.versions for var in program.vars.values() if var.role == "grad" and var.name != "shared.grad"}
    assert grads == ({2} if delayed and stages > 1 else {1})
    assert ("SN" in {a.kind for a in program.schedule.actions()}) == (stages > 1)


def test_a_skipped_update_changes_nothing_but_the_number_of_batches() -> None:
    module = network()
    program, _ = staged(module, 2, "2bw", {"clip": 0.0})
    start = weights_of(module)
    short = run_schedule(program, start, batches_of(17, None))
    spoiled = run_schedule(program, start, batches_of(18, spoiled=17))
    for name, array in spoiled.variables.items():
        if name == "step":
            assert (int(array), int(short.variables[name])) == (18, 17)
        else:
            np.testing.assert_array_equal(array, short.variables[name], err_msg=name)
    whole = run_schedule(program, start, batches_of(18, None))
    assert not np.array_equal(whole.variables["w0"], short.variables["w0"])


def test_options_are_checked() -> None:
    module = optimizer(autodiff(network(), AutodiffOptions(M)), OptimizerOptions())
    with pytest.raises(UsageError, match=r"clip must not be negative, got -1; grow_every must be at least 1, got 0"):
        guard(module, GuardOptions(clip=-1, grow_every=0))
    with pytest.raises(UsageError, match="no update graph U"):
        guard(autodiff(network(), AutodiffOptions(M)), GuardOptions())
    with pytest.raises(UsageError, match="loss_scale must be 0 or more"):
        autodiff(network(), AutodiffOptions(M, loss_scale=-1.0))


@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "2bw"), (4, "2bw")])
def test_the_loss_scale_halves_doubles_and_changes_no_gradient(stages: int, schedule: str) -> None:
    module = network()
    start, batches = weights_of(module), batches_of(20, spoiled=5)
    delay = 0 if schedule == "1f1b" else 1
    scaled = guard(
        optimizer(autodiff(module, AutodiffOptions(M, loss_scale=1024.0)), OptimizerOptions(kind="sgd", lr=0.1)),
        GuardOptions(grow_every=4),
    )
    plain = guard(optimizer(autodiff(module, AutodiffOptions(M)), OptimizerOptions(kind="sgd", lr=0.1)), GuardOptions())
    expected = run_recurrence(plain, start, batches, delay=delay)
    found = run_recurrence(scaled, start, batches, delay=delay)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    # 0-3 double, 4 counts one, 5 halves, 6-9, 10-13 and 14-17 double, 18 and 19 count.
    assert float(found.variables[LOSS_SCALE]) == 1024.0 * 2 / 2 * 8
    assert int(found.variables["loss.scale.good"]) == 2
    cuts = {2: ("layer2",), 4: ("layer1", "layer2", "layer3")}.get(stages, ())
    text = f"partition{{stages={stages},microbatches={M},split_at=[{','.join(cuts)}]}},split,schedule{{kind={schedule},microbatches={M}}},weight-versions,communicate,lifetimes"
    from penstock.passes.manager import parse_pipeline

    program = run_passes(scaled.but(cluster=Cluster.local(stages)), parse_pipeline(text, PASSES), PASSES)
    assert program.vars[LOSS_SCALE].versions == delay + 1
    run = run_schedule(program, start, batches)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-12)
    assert float(run.variables[LOSS_SCALE]) == 8192.0


def at_once(schedule: Schedule) -> Schedule:
    """The same with every update, and what it waits for, right behind the end of its own batch."""
    ranks = {}
    for rank, program in schedule.ranks.items():
        late = [a for a in program.batch if a.kind in ("RN", "U")]
        rest = [a for a in program.batch if a.kind not in ("RN", "U")]
        end = max(i for i, a in enumerate(rest) if a.kind in ("N", "SN")) + 1
        early = [a._replace(mb=1) for a in late]
        ranks[rank] = Program(program.start, (*rest[:end], *early, *rest[end:]))
    return Schedule(schedule.name, schedule.microbatches, ranks)


@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_2bw_does_not_wait_for_the_norm(latency: float) -> None:
    guarded, plain = (staged(network(), 4, "2bw", options)[0].schedule for options in ({"clip": 1.0}, None))
    assert guarded is not None
    assert plain is not None
    assert time_per_batch(guarded, latency=latency) == time_per_batch(plain, latency=latency)
    # The control: with updates at once the last stage waits for the first, every batch.
    assert time_per_batch(at_once(guarded), latency=latency) > 1.4 * time_per_batch(plain, latency=latency)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "zb-1f1b"])
@pytest.mark.parametrize("frozen", [("w0",), ("w3",), ("w1", "w2")], ids="-".join)
def test_stages_without_parameters_agree_too(frozen: tuple[str, ...], schedule: str) -> None:
    module = network()
    module = module.but(
        vars={name: replace(var, role="buffer") if name in frozen else var for name, var in module.vars.items()}
    )
    found, expected, _ = run_staged(module, 4, schedule, 7, {"clip": 0.5})
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    np.testing.assert_allclose(
        [t["gradient.norm"] for t in found.handed_out.values()],
        [t["gradient.norm"] for t in expected.handed_out.values()],
    )


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([name for name, kind in SCHEDULES.items() if kind.trains]),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_late_updates_are_legal_where_the_schedule_is_and_cost_nothing(
    stages: int, m: int, kind: str, tied: bool
) -> None:
    module = network([6] + [8] * stages + [5], tied=tied)
    cuts = tuple(f"layer{i}" for i in range(1, stages))

    def made(options: dict | None) -> Schedule | None:
        calls = training_pipeline(
            {"kind": "sgd"},
            {"stages": stages, "split_at": cuts},
            PipelineOptions(schedule=kind, microbatches=m, guard=options),
        )
        try:
            found = run_passes(module.but(cluster=Cluster.local(stages)), calls, PASSES)
        except VerifyError:
            return None
        verify(found)
        return found.schedule

    plain, guarded = made(None), made({})
    ahead = {"2bw": stages - 1, "eager-2bw": 2 * (stages - 1)}.get(kind, 0)
    assert (plain is None) == (guarded is None) == (ahead > m)
    if plain is not None and guarded is not None:
        assert time_per_batch(guarded, batches=8) == time_per_batch(plain, batches=8)


@functools.cache
def losses_without_penalty() -> list[float]:
    return run_staged(network(), 1, "1f1b", None, {"clip": 0.5})[0].losses


@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "2bw"), (4, "1f1b"), (4, "2bw"), (4, "zb-1f1b")])
@pytest.mark.parametrize("penalised", [("w0",), ("w3",), ("w0", "w2", "w3")], ids="-".join)
def test_a_penalty_on_weights_is_part_of_the_loss(penalised: tuple[str, ...], stages: int, schedule: str) -> None:
    """It depends on variables only, so that it belongs to no stage: its gradient is added once."""
    module = network()
    *ops, last = module.graphs["main"].ops
    ops.append(make("mse", last.ins, ["fit"]))
    total, reads = ops[-1].outs[0], {op.var: op.outs[0] for op in ops if op.kind == "read"}
    for name in penalised:
        ops.append(make("mul", (reads[name], reads[name]), [f"{name}.square"]))
        ops.append(make("sum", ops[-1].outs, [f"{name}.penalty"], axes=(0, 1)))
        ops.append(make("add", (total, ops[-1].outs[0]), [f"{name}.total"]))
        total = ops[-1].outs[0]
    graph = Graph("main", module.graphs["main"].ins, (total,), tuple(ops))
    found, expected, _ = run_staged(
        module.but(outputs=(total.name,), graphs={"main": graph}), stages, schedule, None, {"clip": 0.5}
    )
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    assert not np.allclose(found.losses, losses_without_penalty(), rtol=1e-3)


def changed(module: Module, name: str, rule) -> Module:
    """The module with every operation of one graph replaced by what `rule` gives, nothing where that is None."""
    graph = module.graphs[name]
    return module.with_graph(replace(graph, ops=tuple(new for op in graph.ops if (new := rule(op)) is not None)))


def without(op: Op, kind: str, var: str) -> Op | None:
    return None if op.kind == kind and op.attrs.get("var") == var else op


def test_stages_that_do_not_agree_are_refused() -> None:
    program, _ = staged(network(tied=True), 2, "2bw", {"clip": 0.5})
    verify(program)
    squares = {s: Value(f"gradients.squares.s{s}", TensorType("f64", ())) for s in range(2)}

    def renamed(op: Op, old: Value, new: Value) -> Op:
        return Op(op.kind, tuple(new if v == old else v for v in op.ins), op.outs, op.attrs, op.loc)

    def swapped(op: Op) -> Op:
        parts = [v.name.startswith("shared.grad.s") for v in op.ins]
        return Op(op.kind, op.ins[::-1], op.outs, op.attrs, op.loc) if len(parts) == 2 and all(parts) else op

    own = Op("read", (), (Value("own", TensorType("f32", (8, 8))),), {"var": "shared.grad"})
    norm = program.graphs["s0.N"]
    faults = [
        (
            changed(program, "s1.U", lambda op: renamed(op, squares[0], squares[1])),
            "%gradients.squares is computed otherwise by @s0.U",
        ),
        (changed(program, "s1.U", swapped), "%shared.total is computed otherwise by @s0.U"),
        (
            changed(program, "s1.U", lambda op: without(op, "write", "shared.adam_m")),
            "does not write @shared.adam_m, a copy of what stages [0]",
        ),
        (program.with_graph(replace(norm, ops=(own, *norm.ops))), "@s0.N: uses @shared.grad, which @s0.P has taken"),
        (
            program.but(vars={**program.vars, "w0.adam_m": replace(program.vars["w0.adam_m"], versions=2)}),
            "state has 2 versions",
        ),
        (
            program.but(vars={n: replace(v, versions=1) if v.role == "grad" else v for n, v in program.vars.items()}),
            "1 buffer is kept",
        ),
    ]
    written = next(op for op in program.graphs["s0.U"].ops if op.kind == "write" and op.var == "w0")
    chosen = next(op for op in program.graphs["s0.U"].ops if written.ins[0] in op.outs)
    bare = changed(program, "s0.U", lambda op: Op("write", (chosen.ins[2],), (), op.attrs) if op == written else op)
    faults.append((bare, "writes @w0 without %gradients.squares.s0"))
    for module, said in faults:
        with pytest.raises(VerifyError) as caught:
            verify(module)
        assert said in str(caught.value)
