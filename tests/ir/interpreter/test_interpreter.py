"""Graphs, the training recurrence and schedules in NumPy: against torch loops, against each other, and with broken programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.recurrence import microbatches_of, run_recurrence
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.interpreter.store import DictStore, VersionStore
from penstock.ir.schedule import Program, Schedule
from penstock.ir.text import parse_module
from penstock.passes.communicate.communicate import CommunicateOptions, communicate
from penstock.passes.memory.lifetimes import LifetimesOptions, lifetimes
from penstock.passes.partition.partition import PartitionOptions, partition
from penstock.passes.partition.split import SplitOptions, split
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify
from penstock.passes.schedules.schedule import ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import WeightVersionsOptions, weight_versions
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.passes.training.optimizer import OptimizerOptions, optimizer
from penstock.support.errors import UsageError, VerifyError

M, BATCHES = 4, 6
TEXT = """module @mlp {
  input %x : f32[2,5]
  input %labels : i64[2]
  output %loss
  output %y
  var @w1 : f32[5,8] param
  var @b1 : f32[8] param
  var @w2 : f32[8,8] param
  var @w3 : f32[8,8] param
  var @shift : f32[8] buffer
  var @w4 : f32[8,3] param
  graph @main(%x : f32[2,5], %labels : i64[2]) {
    %w1 : f32[5,8] = read(@w1)
    %b1 : f32[8] = read(@b1)
    %shift : f32[8] = read(@shift)
    %w2 : f32[8,8] = read(@w2)
    %w3 : f32[8,8] = read(@w3)
    %w4 : f32[8,3] = read(@w4)
    %h0 : f32[2,8] = matmul(%x, %w1) ; /1
    %h : f32[2,8] = add(%h0, %b1) ; /1
    %a : f32[2,8] = gelu(%h) ; /1
    %a2 : f32[2,8] = matmul(%a, %w2) ; /2
    %a3 : f32[2,8] = relu(%a2) ; /2
    %a4 : f32[2,8] = matmul(%a3, %w3) ; /3
    %a5 : f32[2,8] = add(%a4, %a) ; /skip
    %a6 : f32[2,8] = add(%a5, %shift) ; /skip
    %y : f32[2,3] = matmul(%a6, %w4) ; /4
    %loss : f32[], %lse : f32[2] = cross_entropy(%y, %labels) ; /loss
    return %loss, %y
  }
}
"""


def unsplit(kind="sgd", lr=0.05):
    module = autodiff(parse_module(TEXT), AutodiffOptions(M))
    return simplify(optimizer(module, OptimizerOptions(kind, lr)), SimplifyOptions())


def data():
    rng = np.random.default_rng(2)
    weights = {name: rng.normal(size=var.type.shape) * 0.5 for name, var in parse_module(TEXT).vars.items()}
    return weights, [{"x": rng.normal(size=(2 * M, 5)), "labels": rng.integers(0, 3, 2 * M)} for _ in range(BATCHES)]


def torch_loss(w, x, labels):
    a = F.gelu(x @ w["w1"] + w["b1"])
    return F.cross_entropy((torch.relu(a @ w["w2"]) @ w["w3"] + a + w["shift"]) @ w["w4"], labels)


def stale_training(delay, lr=0.05):
    """W(t+1) = W(t) - lr * grad f(W(t - delay)), written out with torch in float64."""
    weights, batches = data()
    history = [{name: torch.tensor(x) for name, x in weights.items()}]
    losses = []
    for t, batch in enumerate(batches):
        used = {name: x.clone().requires_grad_(name != "shift") for name, x in history[max(t - delay, 0)].items()}
        for x, labels in zip(torch.tensor(batch["x"]).split(2), torch.tensor(batch["labels"]).split(2), strict=True):
            loss = torch_loss(used, x, labels)
            (loss / M).backward()
            losses.append(loss.item())
        history.append(
            {name: x if used[name].grad is None else x - lr * used[name].grad for name, x in history[-1].items()}
        )
    return losses, {name: x.numpy() for name, x in history[-1].items()}


# ---------------------------------------------------------------------------------------- graphs


def test_inputs_by_position_and_by_name_and_state():
    graph = parse_module(
        """module @m {
  var @w : f32[2] param
  var @g : f32[2] grad init zeros
  graph @main(%x : f32[2], %y : f32[2]) {
    %w : f32[2] = read(@w)
    %s : f32[2] = mul(%x, %w)
    accum(%s, @g)
    accum(%y, @g)
    write(%y, @w)
    %t : f32[2] = take(@g)
    save %x, %s
    return %t
  }
}
"""
    ).graphs["main"]
    x, y, w = np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0])
    for ins in ([x, y], {"y": y, "x": x, "more": 1}):
        store = DictStore({"w": w, "g": np.ones(2)})
        taken, saved = run_graph(graph, ins, store)
        np.testing.assert_array_equal(taken, 1 + x * w + y)
        np.testing.assert_array_equal(saved, x * w)
        np.testing.assert_array_equal(store.arrays["g"], 0)
        np.testing.assert_array_equal(store.arrays["w"], y)
        assert taken.dtype == np.float32
    assert run_graph(graph, [x, y], DictStore({"w": w, "g": np.ones(2)}), "f64")[0].dtype == np.float64
    with pytest.raises(VerifyError, match="missing: y"):
        run_graph(graph, {"x": x}, DictStore({}))
    with pytest.raises(VerifyError, match=r"%y is f32\[2\], got an array of float64\[3\]"):
        run_graph(graph, [x, np.zeros(3)], DictStore({}))
    with pytest.raises(VerifyError, match="got an array of int64"):
        run_graph(graph, [x, np.array([1, 2])], DictStore({}))
    with pytest.raises(VerifyError, match="no value for variable @w"):
        run_graph(graph, [x, y], DictStore({}))


def test_errors_name_graph_operation_and_loc():
    module = parse_module(
        "module @m {\n  graph @main(%t : f32[3,2], %i : i64[2]) {\n    %e : f32[2,2] = gather(%t, %i) ; /embed\n    return %e\n  }\n}\n"
    )
    with pytest.raises(VerifyError, match=r"@main: gather %e \(/embed\): gather index 7 is outside -3..2"):
        run_graph(module.graphs["main"], [np.zeros((3, 2)), np.array([0, 7])])


def test_version_store_keeps_each_version_in_its_slot():
    module = parse_module("module @m {\n  var @w : f32[] param versions 2\n  var @s : f32[] state init zeros\n}\n")
    store = VersionStore(module.vars, {"w"}, {"w": np.array(10.0), "s": np.array(0.0)})
    assert store.buffers("w") == 1
    for version in (1, 2, 3):
        view = store.at(version - 1, made=version)
        assert view.read("w", "latest") == 9.0 + version
        view.write("w", np.array(10.0 + version))
        view.write("s", np.array(float(version)))
        assert store.buffers("w") == 2
        assert store.buffers("s") == 1
    assert store.at(2).read("w", "mb") == 12
    assert store.at(3).read("w", "mb") == 13
    assert store.at().read("s", "latest") == 3
    with pytest.raises(VerifyError, match="version 1 of @w is asked for, its 2 slots hold 2, 3"):
        store.at(1).read("w", "mb")
    with pytest.raises(VerifyError, match="version 3 of @w is written"):
        store.at(made=3).write("w", np.array(0.0))


def test_batches_are_cut_in_order_and_checked():
    module = parse_module(TEXT)
    _, batches = data()
    parts = microbatches_of(module, batches[0])
    assert len(parts) == M
    np.testing.assert_array_equal(np.concatenate([p["x"] for p in parts]), batches[0]["x"])
    with pytest.raises(UsageError) as caught:
        microbatches_of(module, {"x": np.zeros((3, 5))})
    assert "input x has shape [3, 5]" in str(caught.value)
    assert "input labels is missing" in str(caught.value)
    with pytest.raises(UsageError, match="different numbers of microbatches"):
        microbatches_of(module, {"x": np.zeros((4, 5)), "labels": np.zeros(6, int)})


# ---------------------------------------------------------------------------------------- the recurrence


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_recurrence_equals_a_torch_loop(delay):
    run = run_recurrence(unsplit(), *data(), delay)
    losses, weights = stale_training(delay)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-10)
    for name, expected in weights.items():
        np.testing.assert_allclose(run.variables[name], expected, rtol=1e-9, atol=1e-12)
    assert [entry[3] for entry in run.log] == [max(mb // M - delay, 0) for mb in range(M * BATCHES) for _ in "FB"]
    assert run.buffers["w1"] == delay + 1


def test_control_delays_differ():
    losses = [np.array(run_recurrence(unsplit(), *data(), delay).losses) for delay in (0, 1, 2)]
    np.testing.assert_array_equal(losses[0][:M], losses[1][:M])
    assert np.abs(losses[0] / losses[1] - 1).max() > 1e-3
    assert np.abs(losses[1] / losses[2] - 1).max() > 1e-3


def test_typed_recurrence_is_close_but_not_float64():
    exact, typed = (run_recurrence(unsplit("adamw", 0.01), *data(), 1, precision) for precision in ("f64", "typed"))
    np.testing.assert_allclose(typed.losses, exact.losses, rtol=1e-4)
    assert typed.losses != exact.losses
    assert typed.variables["w1"].dtype == np.float32


def test_forward_only():
    weights, batches = data()
    run = run_recurrence(parse_module(TEXT), weights, batches)
    assert [entry[2] for entry in run.log] == ["F"] * (M * BATCHES)
    assert run.outputs[3]["y"].shape == (2, 3)
    with pytest.raises(VerifyError, match="no weights for @w1; @b1 is"):
        run_recurrence(
            parse_module(TEXT), {**{k: v for k, v in weights.items() if k != "w1"}, "b1": np.zeros(3)}, batches
        )


# ---------------------------------------------------------------------------------------- schedules

DELAYS = {"2bw": 1, "1f1b": 0, "gpipe": 0}


def pipeline(kind, stages, optimizer_kind="adamw"):
    """The unsplit module, and the module after every pass from `schedule` on."""
    whole = unsplit(optimizer_kind, 0.01)
    module = schedule(split(partition(whole, PartitionOptions(stages)), SplitOptions()), ScheduleOptions(kind, M))
    found = {"schedule": module}
    for name, run, options in (
        ("weight-versions", weight_versions, WeightVersionsOptions()),
        ("communicate", communicate, CommunicateOptions()),
        ("lifetimes", lifetimes, LifetimesOptions()),
    ):
        module = run(module, options)
        found[name] = module
    return whole, found


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", DELAYS)
def test_every_schedule_equals_its_recurrence(kind, stages):
    """Bit for bit, at every step of the way; and the log is v(k) = max(k // m - delay, 0) on every stage."""
    whole, modules = pipeline(kind, stages)
    weights, batches = data()
    expected = run_recurrence(whole, weights, batches, DELAYS[kind])
    for name, module in modules.items():
        run = run_schedule(module, weights, batches)
        if name == "schedule" and DELAYS[kind]:
            assert run.losses != expected.losses  # no versions yet: reads take the newest weights
            continue
        assert run.losses == expected.losses, name
        for variable, array in expected.variables.items():
            np.testing.assert_array_equal(run.variables[variable], array, err_msg=variable)
        assert all(np.array_equal(run.outputs[mb]["y"], expected.outputs[mb]["y"]) for mb in expected.outputs)
        if name != "schedule":
            log = {(stage, mb, phase): version for stage, mb, phase, version in run.log}
            assert len(log) == len(run.log) == 2 * stages * M * BATCHES
            assert all(version == max(mb // M - DELAYS[kind], 0) for (_, mb, _), version in log.items())
        assert max(run.buffers.values()) == (DELAYS[kind] + 1 if name != "schedule" else 1)


@pytest.mark.parametrize("kind", DELAYS)
def test_a_run_goes_on_where_another_ended(kind):
    """From variables and previous versions: what a checkpoint of a drained pipeline holds."""
    _, modules = pipeline(kind, 2)
    weights, batches = data()
    whole = run_schedule(modules["lifetimes"], weights, batches)
    first = run_schedule(modules["lifetimes"], weights, batches, batches_count=2)
    second = run_schedule(modules["lifetimes"], first.variables, batches[2:], first=2, previous=first.previous)
    assert first.losses + second.losses == whole.losses
    for name, array in whole.variables.items():
        np.testing.assert_array_equal(second.variables[name], array)
    if DELAYS[kind]:
        with pytest.raises(VerifyError, match="version 1 of @w1 is asked for"):
            run_schedule(modules["lifetimes"], first.variables, batches[2:], first=2)


# ---------------------------------------------------------------------------------------- broken programs


def wired(toy, kind="2bw", stages=2):
    module = weight_versions(schedule(toy(stages), ScheduleOptions(kind, M)), WeightVersionsOptions())
    return lifetimes(communicate(module, CommunicateOptions()), LifetimesOptions())


def run_toy(module, batches=3):
    rng = np.random.default_rng(0)
    weights = {name: rng.uniform(0.5, 1.5, 4) for name in module.vars if not name.endswith("grad")}
    return run_schedule(module, weights, [{"x": rng.normal(size=4 * M)} for _ in range(batches)])


def edited(module, edit):
    """The module with `edit(list of actions)` applied to the batch program of rank 0 (and again wherever it says)."""
    found = module.schedule
    ranks = {rank: Program(p.start, tuple(edit(rank, list(p.batch)))) for rank, p in found.ranks.items()}
    return module.but(schedule=Schedule(found.name, found.microbatches, ranks))


def without(kind, rank):
    def edit(r, actions):
        dropped = next(a for a in actions if a.kind == kind) if r == rank else None
        return [a for a in actions if a != dropped]

    return edit


def test_the_toy_runs(toy):
    run = run_toy(wired(toy))
    assert sorted(run.outputs) == list(range(3 * M))
    assert run.buffers == {"w0": 2, "w1": 2}


BROKEN = [
    ("a send is missing", without("SF", 0), "no rank can move|the next message is of microbatch"),
    ("a receive is missing", without("RF", 1), "does not hold|next message"),
    ("a backward is missing", without("B", 1), "should be sent|holds nothing"),
    (
        "a value is dropped and used again",
        lambda r, actions: [a for a in actions if a.kind == "D"] + actions if r == 1 else actions,
        "could be dropped",
    ),
    (
        "dropped too early",
        lambda r, actions: sorted(actions, key=lambda a: a.mb * 10 + {"D": 1}.get(a.kind, 2)) if r == 1 else actions,
        "dropped|does not hold",
    ),
    (
        "messages out of order",
        lambda r, actions: [a._replace(mb=a.mb ^ 1) if a.kind == "SF" else a for a in actions],
        "does not hold|next message",
    ),
    ("no update", lambda r, actions: [a for a in actions if a.kind != "U"], "version 1 of @w. is asked for"),
    (
        "a version too new",
        lambda r, actions: [a._replace(version=a.version + 1) if a.kind == "F" else a for a in actions],
        "is asked for",
    ),
    (
        "an update twice",
        lambda r, actions: [b for a in actions for b in ([a, a] if a.kind == "U" else [a])],
        "is written, the newest is",
    ),
    (
        "an unknown graph",
        lambda r, actions: [a._replace(kind="W") if a.kind == "B" else a for a in actions],
        "no graph @s",
    ),
]


@pytest.mark.parametrize(("edit", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_broken_programs_are_noticed(toy, edit, message):
    module = wired(toy)
    with pytest.raises(VerifyError, match=message) as caught:
        run_toy(edited(module, edit))
    assert "rank" in str(caught.value)


def test_deadlock_names_every_rank(toy):
    """Both ranks receive before they send."""

    def edit(rank, actions):
        first = "RB" if rank == 0 else "RF"
        return sorted(actions, key=lambda a: a.kind != first)

    module = edited(wired(toy, "1f1b"), edit)
    with pytest.raises(VerifyError) as caught:
        run_toy(module)
    assert "rank 0, step 0: 0RB0<1 waits for a message from rank 1" in str(caught.value)
    assert "rank 1" in str(caught.value)


def test_unwired_deadlock_names_what_is_missing(toy):
    module = schedule(toy(2), ScheduleOptions("1f1b", M))
    stuck = edited(module, lambda r, actions: sorted(actions, key=lambda a: a.kind != "B") if r == 0 else actions)
    with pytest.raises(VerifyError, match=r"0B0 waits for %h0.grad of microbatch 0"):
        run_toy(stuck)


def test_unreceived_messages_are_noticed(toy):
    module = edited(
        wired(toy, "gpipe"), lambda r, actions: [a for a in actions if not (a.kind in ("RB", "B", "D") and r == 0)]
    )
    with pytest.raises(VerifyError, match="never received: 1B>0"):
        run_toy(module)


def test_retired_too_late_is_counted(toy):
    """A third version where two would do is seen in the number of buffers, and one too few is an error."""
    module = wired(toy)
    more = module.but(vars={n: replace(v, versions=3) if v.role == "param" else v for n, v in module.vars.items()})
    assert set(run_toy(more).buffers.values()) == {3}
    fewer = module.but(vars={n: replace(v, versions=1) if v.role == "param" else v for n, v in module.vars.items()})
    with pytest.raises(VerifyError, match="is asked for"):
        run_toy(fewer)


def test_usage_errors(toy):
    weights, batches = data()
    with pytest.raises(UsageError, match="no schedule"):
        run_schedule(unsplit(), weights, batches)
    _, modules = pipeline("1f1b", 2)
    with pytest.raises(UsageError, match="the schedule has 4"):
        run_schedule(modules["lifetimes"], weights, [{k: v[:4] for k, v in batches[0].items()}])
    with pytest.raises(UsageError, match="7 batches are asked for"):
        run_schedule(modules["lifetimes"], weights, batches, batches_count=7)
    with pytest.raises(UsageError, match="before `split`"):
        run_recurrence(modules["lifetimes"], weights, batches)
