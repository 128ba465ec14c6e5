"""Forwards that are done again by actions of their own: off the critical path on paper, the same numbers, less in
memory, and no more often than memory asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.oracles.drawn_chains import chain_model

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.grid import simulate
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.passes.manager import run_passes
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.memory.repeated import again, apart, waiting_numbers
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.schedules.schedule import build_packs, build_schedule
from penstock.passes.simulator.simulate import simulate as simulated
from penstock.passes.simulator.wiring import wire_chain
from penstock.support.errors import DoesNotFit, VerifyError

# ------------------------------------------------------------------------------------------------ on paper

SIZES = [(4, 8, 41, 44), (8, 8, 53, 60), (8, 32, 149, 156)]


def with_all_again(built: Schedule, *, last: bool = False) -> Schedule:
    """A wired schedule in which every stage does again what waits; the last one does so if asked for."""
    for stage in built.members():
        numbers = frozenset(range(built.microbatches)) if last else waiting_numbers(built, stage)
        built = again(built, stage, numbers, lets_go=False)
    return built


@pytest.mark.parametrize(("d", "m", "off", "on"), SIZES)
def test_it_runs_while_ranks_wait_for_gradients(d: int, m: int, off: int, on: int) -> None:
    """A forward takes 1, a backward 2, a forward again 1: (m+d-1)(tf+tb+tr) - (d-1) tr if the last stage takes part,
    and 2 tr less if it does not. Copies in the backward of every stage take (m+d-1)(tf+tb+tr)."""
    wired = wire_chain(build_schedule("1f1b", d, m))
    found = with_all_again(wired)
    assert simulate(with_all_again(wired, last=True), 1).finish == off == (m + d - 1) * 4 - (d - 1)
    assert simulate(found, 1).finish == off - 2
    seconds = {"F": 1.0, "R": 1.0, "B": 2.0}
    assert simulated(found, 1, lambda rank, a: seconds.get(a.kind, 0.0), nothing).finish == off - 2
    assert simulate(wired, 1, 1, 3).finish == on == (m + d - 1) * 4
    # The control: behind the receive of the gradient it is on the critical path.
    assert simulate(behind_receives(found), 1).finish > off


def nothing(phase: str, source: int, target: int) -> float:
    return 0.0


def behind_receives(schedule: Schedule) -> Schedule:
    def moved(actions: Sequence[Action]) -> tuple[Action, ...]:
        listed = list(actions)
        for at, action in enumerate(listed):
            if action.kind == "R" and listed[at + 1].kind == "RB":
                listed[at : at + 2] = listed[at + 1], action
        return tuple(listed)

    ranks = {rank: Program(moved(p.start), moved(p.batch)) for rank, p in schedule.ranks.items()}
    return Schedule(schedule.name, schedule.microbatches, ranks)


def test_a_backward_that_follows_its_forward_at_once_waits_for_nothing() -> None:
    for kind in ("1f1b", "2bw", "eager-2bw", "zb-1f1b"):
        built = build_schedule(kind, 4, 8)
        assert [len(waiting_numbers(built, stage)) for stage in range(4)] == [8, 8, 8, 0], kind
    assert [len(waiting_numbers(build_schedule("gpipe", 2, 4), stage)) for stage in range(2)] == [4, 4]
    packed = build_packs("interleaved", ((0, 2), (1, 3)), 4)
    assert [len(waiting_numbers(packed, stage)) for stage in range(4)] == [4, 4, 4, 0]


# ------------------------------------------------------------------------------------------------ whole programs

M, ROWS, WIDTHS = 8, 64, [4, *[32] * 7, 4]
DEEP = tuple(f"layer{i}" for i in range(2, 8, 2))
CASES = {
    "1f1b": ("1f1b", 4, 1, DEEP),
    "2bw": ("2bw", 4, 1, DEEP),
    "gpipe": ("gpipe", 2, 1, ("layer4",)),
    "zb-1f1b": ("zb-1f1b", 4, 1, DEEP),
    "interleaved": ("interleaved", 2, 2, DEEP),
    "zb-v": ("zb-v", 2, 2, DEEP),
}


@cache
def compiled(case: str, mode: str = "none") -> Module:
    return capped(case, mode, ())


def capped(case: str, mode: str, caps: Sequence[int]) -> Module:
    """A program with no more memory than this on each device; without limits if none are given."""
    schedule, devices, packs, cuts = CASES[case]
    cluster = Cluster.local(devices)
    limited = (replace(device, spaces=(("ram", cap),)) for device, cap in zip(cluster.devices, caps, strict=False))
    cluster = replace(cluster, devices=tuple(limited) or cluster.devices)
    options = PipelineOptions(schedule=schedule, microbatches=M, packs=packs, recompute=mode)
    calls = training_pipeline({"kind": "adamw", "lr": 0.1}, {"split_at": cuts}, options)
    return run_passes(chain_model(WIDTHS, [], rows=ROWS).but(cluster=cluster), calls, PASSES)


def trained(module: Module):
    draw = np.random.default_rng(5)
    params = [name for name, var in module.vars.items() if var.role == "param"]
    weights = {n: draw.standard_normal(module.vars[n].type.dims).astype("f4") for n in params}
    batches = [
        {v.name: draw.standard_normal((ROWS * M, *v.type.dims[1:])).astype("f4") for v in module.data_inputs}
        for _ in range(3)
    ]
    return run_schedule(module, weights, batches, precision=TYPED)


def done_again(module: Module) -> Counter[int]:
    """The number of operations that are done again in a batch, by stage."""
    counts = Counter[int]()
    assert module.schedule is not None
    for program in module.schedule.ranks.values():
        for action in program.batch:
            graph = module.stage_graph(action.stage, action.kind)
            counts[action.stage] += sum("recompute" in op.attrs for op in graph.ops) if graph is not None else 0
    return +counts


def same(one, other) -> None:
    assert one.losses == other.losses
    assert all(np.array_equal(array, other.variables[name]) for name, array in one.variables.items())


def peaks(module: Module) -> list[int]:
    return [row.peak for row in measure_memory(module).values()]


@pytest.mark.parametrize("case", CASES)
def test_all_is_the_same_bit_for_bit_with_less_in_memory(case: str) -> None:
    whole, everything = compiled(case), compiled(case, "all")
    verify(everything)
    assert parse_module(print_module(everything)) == everything
    same(trained(everything), trained(whole))
    stages = [stage.index for stage in whole.stages]
    last = [] if case == "gpipe" else [stages[-1]]
    assert set(done_again(everything)) == set(stages) - set(last)
    activations = [[row.activations for row in measure_memory(m).values()] for m in (whole, everything)]
    assert activations[1][0] < activations[0][0]


def test_backwards_in_two_parts_are_left_as_they_are() -> None:
    whole, everything = compiled("zb-1f1b"), compiled("zb-1f1b", "all")
    parted = [s.index for s in whole.stages if whole.stage_graph(s.index, "W") is not None]
    assert len(parted) == 3
    for stage in parted:
        assert [everything.stage_graph(stage, kind) for kind in "BW"] == [whole.stage_graph(stage, k) for k in "BW"]
    assert {1, 2} <= set(done_again(everything))


@pytest.mark.parametrize("case", ["1f1b", "zb-1f1b"])
def test_caps_choose_fewer_than_all_at_the_same_peak(case: str) -> None:
    """Every device has what stage 0 takes when all is done again, or its own part where that is more."""
    everything = compiled(case, "all")
    caps = [max(peak, peaks(everything)[0]) for peak in peaks(everything)]
    module = capped(case, "auto", caps)
    assert all(peak <= cap for peak, cap in zip(peaks(module), caps, strict=True))
    assert 0 < done_again(module).total() < done_again(everything).total()
    assert not done_again(module)[3]
    same(trained(module), trained(compiled(case)))
    with pytest.raises(DoesNotFit, match="at the worst moment"):  # the control: nothing done again
        capped(case, "none", caps)
    with pytest.raises(DoesNotFit, match="stage 0"):  # and one byte less than all can do
        capped(case, "auto", [peaks(everything)[0] - 1, *caps[1:]])


def test_more_memory_lets_more_keep_what_they_saved() -> None:
    low, high = (peaks(compiled("zb-1f1b", mode))[0] for mode in ("all", "none"))
    above = peaks(compiled("zb-1f1b"))[1:]
    spent = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        cap = int(low + (high - low) * part)
        module = capped("zb-1f1b", "auto", [cap, *above])
        assert peaks(module)[0] <= cap
        spent.append(done_again(module).total())
    assert spent == sorted(spent, reverse=True)
    assert spent[0] > spent[2] > spent[-1] == 0


@pytest.fixture(scope="module")
def some() -> Module:
    """A program in which stage 0 does something again for three microbatches of a batch only."""
    whole = compiled("gpipe")
    assert whole.schedule is not None
    forward, backward = whole.graphs["s0.F"], whole.graphs["s0.B"]
    dropped = [op for op in forward.ops if not {*op.outs}.isdisjoint(forward.saved)]
    numbers = frozenset({1, 4, 5})
    graphs = apart(forward, backward, dropped, numbers, lets_go=True)
    schedule = graphs.scheduled(whole.schedule.rewrite(lambda a: () if a.kind == "D" else (a,)), 0)
    module = whole.but(schedule=schedule, graphs={**whole.graphs, **graphs.graphs})
    return lifetimes(fuse(module, FuseOptions()))


def test_microbatches_let_go_where_others_keep(some: Module) -> None:
    assert some.schedule is not None
    listed = [a for a in some.schedule.ranks[0].batch if a.kind in "LR"]
    let_go, repeated = ([a.mb for a in listed if a.kind == kind] for kind in "LR")
    assert let_go == repeated == [M + 1, M + 4, M + 5]
    assert peaks(compiled("gpipe", "all"))[0] < peaks(some)[0] < peaks(compiled("gpipe"))[0]
    same(trained(some), trained(compiled("gpipe")))


def changed(module: Module, rule) -> Module:
    """The module with each action of rank 0 replaced by what a rule says."""
    assert module.schedule is not None
    return module.but(schedule=module.schedule.rewrite_ranks(lambda rank, a: rule(a) if rank == 0 else (a,)))


def first(module: Module, kind: str) -> Action:
    assert module.schedule is not None
    return next(a for a in module.schedule.ranks[0].batch if a.kind == kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("R", "did not keep and has not computed again"),
        ("L", "computes again what microbatch .* still holds"),
    ],
)
def test_the_verifier_misses_an_action_that_is_left_out(some: Module, kind: str, message: str) -> None:
    gone = first(some, kind)
    with pytest.raises(VerifyError, match=message):
        verify(changed(some, lambda a: () if a == gone else (a,)))


def test_the_verifier_finds_actions_in_wrong_places(some: Module) -> None:
    let_go, repeated = first(some, "L"), first(some, "R")
    backward, forward = repeated._replace(kind="B"), repeated._replace(kind="F")
    without = changed(some, lambda a: () if a in (let_go, repeated) else (a,))
    verify(without)
    wrong = {
        "comes after .*, which takes what it computes": {backward: (let_go, backward, repeated)},
        "comes after .*, which takes it": {backward: (backward, let_go)},
        "which computes it again": {backward: (repeated, let_go, backward)},
        "which saves it": {forward: (let_go, forward), backward: (repeated, backward)},
        "are sent to stage 1": {forward: (forward, let_go), backward: (repeated, backward)},
        "has version": {
            backward: (repeated._replace(version=(repeated.version or 0) + 1), backward),
            forward._replace(kind="SF", version=None, peer=1): (
                forward._replace(kind="SF", version=None, peer=1),
                let_go,
            ),
        },
    }
    for message, places in wrong.items():
        with pytest.raises(VerifyError, match=message):
            verify(changed(without, lambda a, places=places: places.get(a, (a,))))


def test_the_verifier_finds_graphs_that_do_not_belong_together(some: Module) -> None:
    forward, graph = some.graphs["s0.F"], some.graphs["s0.R"]
    kept = tuple(v for v in forward.saved if v != graph.saved[0])
    with pytest.raises(VerifyError, match="expected all or none" if len(graph.saved) > 1 else "again"):
        verify(some.with_graph(replace(forward, saved=kept)))
    with pytest.raises(VerifyError, match="expected nothing"):
        verify(some.with_graph(replace(graph, outs=graph.saved[:1])))
    names = {v.name for v in graph.saved}
    with pytest.raises(VerifyError, match="saves nothing that is computed again"):
        verify(some.with_graph(replace(forward, saved=tuple(v for v in forward.saved if v.name not in names))))


def test_the_interpreter_has_let_go(some: Module) -> None:
    """Without R the backward does not have what L let go of."""
    gone = first(some, "R")
    with pytest.raises(VerifyError, match="%"):
        trained(changed(some, lambda a: () if a == gone else (a,)))


def test_stages_of_a_rank_save_less_together() -> None:
    """What stages of a rank hold is judged by their sum."""
    low, high = (peaks(compiled("interleaved", mode)) for mode in ("all", "none"))
    caps = [(least + most) // 2 for least, most in zip(low, high, strict=True)]
    module = capped("interleaved", "auto", caps)
    assert all(peak <= cap for peak, cap in zip(peaks(module), caps, strict=True))
    assert 0 < done_again(module).total() < done_again(compiled("interleaved", "all")).total()
    same(trained(module), trained(compiled("interleaved")))
    with pytest.raises(DoesNotFit):
        capped("interleaved", "auto", [least // 2 for least in low])
