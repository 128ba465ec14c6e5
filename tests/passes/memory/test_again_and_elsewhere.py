"""Stages of which some saved values are made again, others elsewhere and others kept: the same numbers as with all kept,
the order of the moves and of R, programs that the verifier refuses, and memory that neither fate alone fits into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.oracles.drawn_chains import chain_model
from tests.passes.memory.test_offload import edited, let_sets_go, same

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module, Op
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.memory.predict import measure_memory, planned_account
from penstock.ir.memory.saved_sets import SavedSet, moves_saved, saved_set
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import Call, run_passes
from penstock.passes.memory.recompute_chain import Element, cheapest, least_bytes
from penstock.passes.memory.repeated import apart, waiting_numbers
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

M, ROWS, LAYERS, NARROW, WIDE = 8, 16, 16, 2, 12
CASES = {
    "1f1b": (4, 1),
    "gpipe": (2, 1),
    "2bw": (4, 1),
    "zb-1f1b": (4, 1),
    "interleaved": (2, 2),
    "wrap": (2, 2),
}
# Those of which the first device alone has a limit: there microbatches wait longest.
OF_FIRST = ("1f1b", "2bw", "zb-1f1b")
# Steps from the memory that moves alone need to the least.
STEPS = 8


@cache
def begun(case: str, layers: int) -> tuple[Module, int]:
    """A program of layers that are narrow between stages, so that what is received is small, before anything of it goes
    elsewhere; and the number of passes behind it."""
    devices, packs = CASES[case]
    every = layers // (devices * packs)
    widths = [WIDE if i % every else NARROW for i in range(layers + 1)]
    cluster = replace(Cluster.local(devices), spaces=(Space("disk", bandwidth=1e9),))
    calls = calls_of(case, "activations", "none", layers)
    first = [call.name for call in calls].index("offload")
    return run_passes(chain_model(widths, [], rows=ROWS).but(cluster=cluster), calls[:first], PASSES), len(
        calls
    ) - first


def calls_of(case: str, offload: str, recompute: str, layers: int) -> list[Call]:
    devices, packs = CASES[case]
    every = layers // (devices * packs)
    cuts = tuple(f"layer{i}" for i in range(every, layers, every))
    options = PipelineOptions(schedule=case, microbatches=M, packs=packs, offload=offload, recompute=recompute)
    return training_pipeline({"kind": "adamw", "lr": 0.001}, {"split_at": cuts}, options)


def planned(case: str, offload: str, recompute: str, memory: int = 0, layers: int = LAYERS) -> Module:
    module, behind = begun(case, layers)
    assert module.cluster is not None
    limited = [bool(memory) and (not i or case not in OF_FIRST) for i in range(len(module.cluster.devices))]
    devices = tuple(
        replace(d, spaces=(("ram", memory),) if limit else ())
        for d, limit in zip(module.cluster.devices, limited, strict=True)
    )
    calls = calls_of(case, offload, recompute, layers)[-(behind - (offload == "none")) :]
    return run_passes(module.but(cluster=replace(module.cluster, devices=devices)), calls, PASSES)


@cache
def kept(case: str) -> Module:
    return planned(case, "none", "none")


def peak(module: Module) -> int:
    return max(row.peak for row in measure_memory(module).values())


@cache
def need(case: str, offload: str, recompute: str, layers: int = LAYERS) -> int:
    """The least memory of a device for which there is a plan, by the refusal of much less."""
    with pytest.raises(DoesNotFit) as raised:
        planned(case, offload, recompute, memory=1, layers=layers)
    return max(raised.value.needs.values())


def trained(module: Module):
    draw = np.random.default_rng(5)
    params = [name for name, var in module.vars.items() if var.role == "param"]
    weights = {n: (draw.standard_normal(module.vars[n].type.dims) / 3).astype("f4") for n in params}
    batches = [
        {v.name: draw.standard_normal((ROWS * M, *v.type.dims[1:])).astype("f4") for v in module.data_inputs}
        for _ in range(4)
    ]
    return run_schedule(module, weights, batches, precision=TYPED)


@pytest.fixture(autouse=True)
def also_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    let_sets_go(monkeypatch)


def of_r(module: Module) -> list[Action]:
    assert module.schedule is not None
    return [a for a in module.schedule.actions() if a.kind == "R"]


def copied(module: Module, stage: int) -> bool:
    """Whether the backward of a stage has copies of forward operations."""
    return any("recompute" in op.attrs for op in module.graphs[f"s{stage}.B"].ops)


def stages_of_both(module: Module) -> list[int]:
    return [
        stage.index
        for stage in module.stages
        if stage.home and (f"s{stage.index}.R" in module.graphs or copied(module, stage.index))
    ]


def less_and_less(case: str) -> Iterator[Module]:
    """The programs for less and less memory, from what moves alone fit into."""
    most, least = need(case, "activations", "none"), need(case, "activations", "auto")
    for step in range(1, STEPS):
        yield planned(case, "activations", "auto", memory=most - (most - least) * step // STEPS)


@cache
def mixed(case: str, wanted: Callable[[Module], bool], *, by_r: bool = True) -> Module:
    """The first of these that is `wanted`, where R is taken wherever it fits, or copies in B are."""

    def played(module: Module) -> float:
        return 0.0 if by_r else len(of_r(module))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.passes.memory.recompute._played", played)
        return next(module for module in less_and_less(case) if wanted(module))


def has_r(module: Module) -> bool:
    return any(f"s{stage}.R" in module.graphs for stage in stages_of_both(module))


def has_copies(module: Module) -> bool:
    return any(copied(module, stage) for stage in stages_of_both(module))


def has_all_fates(module: Module) -> bool:
    return any(a.kind == "L" and not a.item for a in of_both(module))


@cache
def with_operand_elsewhere() -> Module:
    """A program whose first stage keeps the results of one layer, elsewhere, and R makes all behind it from these."""
    module, behind = begun("gpipe", LAYERS)
    calls = calls_of("gpipe", "activations", "none", LAYERS)[-behind:]
    module = run_passes(module, calls[:1], PASSES)
    assert module.schedule is not None
    forward, backward = module.graphs["s0.F"], module.graphs["s0.B"]
    saving = [op for op in forward.ops if not {*op.outs}.isdisjoint(forward.saved)]
    repeated = apart(forward, backward, saving[2:], waiting_numbers(module.schedule, 0))
    schedule = repeated.scheduled(module.schedule, 0)
    again = module.but(graphs={**module.graphs, **repeated.graphs}, schedule=schedule)
    return run_passes(again, calls[1:], PASSES)


# ------------------------------------------------------------------------------------------------ numbers and order


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_bit_for_bit_where_r_makes_values_again(case: str) -> None:
    module = mixed(case, has_r)
    verify(module)
    assert parse_module(print_module(module)) == module
    check_order(module)
    assert same(trained(module), trained(kept(case)))


@pytest.mark.parametrize("case", ["gpipe", "2bw", "wrap"])
def test_numbers_are_the_same_bit_for_bit_with_copies_in_the_backward(case: str) -> None:
    module = mixed(case, has_copies, by_r=False)
    verify(module)
    assert same(trained(module), trained(kept(case)))


def check_order(module: Module) -> None:
    """Of a microbatch that is elsewhere and made again R stands behind CI and in front of the receive of the gradient, and
    its saved set has nothing that R makes."""
    assert module.schedule is not None
    both = 0
    for rank in module.schedule.ranks:
        actions = list(module.schedule.expand(rank, 3))
        places = {(a.kind, a.item, a.stage, a.mb): at for at, a in enumerate(actions)}
        for (kind, item, stage, mb), at in places.items():
            back = places.get(("CI", "a0", stage, mb))
            if (kind, item) == ("R", "") and back is not None:
                both += 1
                backward = places["B", "", stage, mb]
                assert places["F", "", stage, mb] < back < at < backward
                between = [a.kind for a in actions[at + 1 : backward]]
                assert set(between) <= {"RB"}
    assert both
    for stage in stages_of_both(module):
        saved, again = saved_set(module, stage), module.graphs.get(f"s{stage}.R")
        assert saved is not None
        made = set() if again is None else {v.name for v in again.saved}
        assert made.isdisjoint(saved.values)
        assert saved.values.keys() <= {v.name for v in module.graphs[f"s{stage}.F"].saved}


def test_one_stage_has_all_three_fates() -> None:
    """Where R runs for some microbatches, others keep what it makes, and the rest of these is elsewhere all the same. L of
    the one and of the other are of different values."""
    module = mixed("gpipe", has_all_fates)
    verify(module)
    actions = of_both(module)
    stage = next(a.stage for a in actions if a.kind == "L" and not a.item)
    numbers = {
        kind: {a.mb % M for a in actions if a.stage == stage and a.kind == kind and not moves_saved(a)}
        for kind in "FLR"
    }
    away = {a.mb % M for a in actions if a.stage == stage and moves_saved(a)}
    assert numbers["L"] == numbers["R"] < numbers["F"]
    assert away - numbers["R"]
    assert away & numbers["R"]
    again, saved = module.graphs[f"s{stage}.R"], saved_set(module, stage)
    assert saved is not None
    names = {"a0": {*saved.values}, "": {v.name for v in again.saved}}
    rank = next(rank for rank, pack in enumerate(module.rank_packs()) if stage in pack)
    account, checked = planned_account(module, rank, [(0, 3)]), set()
    for step, action in enumerate(account.actions):
        if action.kind == "L" and action.stage == stage:
            gone = {name for life in account.lives if life.given_at == step for name in life.names}
            assert gone == names[action.item]
            checked.add(action.item)
    assert checked == {"a0", ""}
    assert same(trained(module), trained(kept("gpipe")))


def of_both(module: Module) -> list[Action]:
    assert module.schedule is not None
    stages = stages_of_both(module)
    return [a for a in module.schedule.actions() if a.stage in stages]


# ------------------------------------------------------------------------------------------------ refused programs


def change(rule: Callable[[Action], Iterable[Action]]) -> Callable[[Module], Module]:
    return lambda module: edited(module, lambda _, a: rule(a) if a.stage == 0 else (a,))


def late_back(module: Module) -> Module:
    """CI of each set stands behind the R of its microbatch."""

    def rule(_: int, a: Action) -> Iterable[Action]:
        if a.stage or (moves_saved(a) and a.kind == "CI"):
            return () if not a.stage else (a,)
        return (a, Action("CI", 0, a.mb, item="a0")) if a.kind == "R" else (a,)

    return edited(module, rule)


def made_and_saved(module: Module) -> Module:
    """R makes a value of the saved set as well, which F saves all the same."""
    again, forward, saved = module.graphs["s0.R"], module.graphs["s0.F"], saved_set(module, 0)
    assert saved is not None
    value = next(iter(saved.values.values()))
    makers, present, ops = forward.producers(), {v for op in again.ops for v in op.outs}, list[Op]()
    waiting = [value]
    while waiting:
        maker = makers.get(one := waiting.pop())
        if maker is not None and one not in present:
            present |= {*maker.outs}
            ops.append(maker)
            waiting += maker.ins
    ops.sort(key=forward.ops.index)
    ins = {v for op in (*again.ops, *ops) for v in op.ins} - present
    order = (*again.ins, *forward.ins)
    taken = tuple(dict.fromkeys(v for v in order if v in ins))
    return module.with_graph(replace(again, ins=taken, ops=(*ops, *again.ops), saved=(*again.saved, value)))


REFUSED = {
    "R in front of the CI of what it takes": (
        late_back,
        r"0R\d+.*takes %{taken} of microbatch \d+, .*\(no 0CI\d+:a0 b",
    ),
    "CI left out": (
        change(lambda a: () if a.kind == "CI" else (a,)),
        r"0R\d+.*takes %{taken} of microbatch \d+, which is at home in disk \(no 0CI\d+:a0 before\)",
    ),
    "R left out": (change(lambda a: () if a.kind == "R" else (a,)), r"did not keep and has not computed again"),
    "a value of the set is made again": (made_and_saved, "expected all or none"),
    "L of the set is one of what R makes": (
        change(lambda a: (a._replace(item=""),) if a.kind == "L" else (a,)),
        r"@s0\.F saves nothing that is computed again",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_the_verifier_refuses(how: str) -> None:
    edit, message = REFUSED[how]
    module = with_operand_elsewhere()
    saved = saved_set(module, 0)
    assert saved is not None
    taken = min(v.name for v in module.graphs["s0.R"].ins if v.name in saved.values)
    with pytest.raises(VerifyError, match=message.format(taken=taken) if "{taken}" in message else message):
        verify(edit(module))


@pytest.mark.parametrize("how", ["R in front of the CI of what it takes", "CI left out", "R left out"])
def test_the_interpreter_refuses_it_as_well(how: str) -> None:
    module = with_operand_elsewhere()
    with pytest.raises(VerifyError, match="does not hold"):
        trained(REFUSED[how][0](module))


def test_a_set_that_had_what_r_makes_would_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of what a saved set is: one with a value that R makes is moved when the device does not hold it."""
    module = with_operand_elsewhere()
    again = module.graphs["s0.R"]

    def with_what_r_makes(one: Module, stage: int) -> SavedSet | None:
        saved = saved_set(one, stage)
        if saved is None or stage:
            return saved
        return replace(saved, values={**saved.values, again.saved[0].name: again.saved[0]})

    monkeypatch.setattr("penstock.ir.interpreter.schedules.saved_set", with_what_r_makes)
    with pytest.raises(VerifyError, match=rf"does not hold %{again.saved[0].name}, which is moved"):
        trained(module)


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("case", ["gpipe", "wrap"])
def test_a_program_that_fits_with_moves_alone_is_what_it_was(case: str) -> None:
    memory = need(case, "activations", "none")
    for more in (0, memory // 8):
        alone, auto = (planned(case, "activations", mode, memory=memory + more) for mode in ("none", "auto"))
        assert (auto.graphs, auto.schedule, auto.stages) == (alone.graphs, alone.schedule, alone.stages)
    assert stages_of_both(planned(case, "activations", "auto", memory=memory - 1))


def test_both_together_fit_where_neither_fits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In so many layers that a part of them is made again in less memory than all of them."""
    monkeypatch.undo()
    least = {}
    for layers in (16, 24, 32, 48, 64):
        least = {
            (offload, recompute): need("gpipe", offload, recompute, layers)
            for offload, recompute in (("none", "auto"), ("activations", "none"), ("activations", "auto"))
        }
        if least["activations", "auto"] < min(least["none", "auto"], least["activations", "none"]):
            break
    memory = least["activations", "auto"]
    assert memory < min(least["none", "auto"], least["activations", "none"])
    module = planned("gpipe", "activations", "auto", memory, layers)
    verify(module)
    assert peak(module) <= memory
    assert stages_of_both(module)
    for offload, recompute in (("none", "auto"), ("none", "all"), ("activations", "none")):
        with pytest.raises(DoesNotFit):
            planned("gpipe", offload, recompute, memory, layers)
    with pytest.raises(DoesNotFit):
        planned("gpipe", "activations", "auto", memory - 1, layers)
    assert same(trained(module), trained(planned("gpipe", "none", "none", layers=layers)))


def test_no_more_sets_go_than_memory_asks_for() -> None:
    """With one set fewer elsewhere, that which waits for fewest computations, a device has too little."""
    fewer = 0
    for module in less_and_less("gpipe"):
        assert module.cluster is not None
        assert module.schedule is not None
        (memory,) = {device.memory for device in module.cluster.devices}
        assert peak(module) <= memory
        for stage in stages_of_both(module):
            numbers = {a.mb % M for a in module.schedule.actions() if moves_saved(a) and a.stage == stage}
            fewer += len(numbers) < M
            last = max(numbers)
            # In gpipe a later microbatch waits for fewer computations.
            there = edited(module, lambda _, a, last=last: () if moves_saved(a) and a.mb % M == last else (a,))
            assert measure_memory(there)[stage].peak > memory
    assert fewer


def test_where_all_is_made_again_nothing_is_left_to_move() -> None:
    with pytest.raises(UsageError, match=r"forwards keep nothing that has to be elsewhere.*nothing would be gained"):
        planned("gpipe", "activations", "all")


def test_the_least_of_a_chain_is_the_least_that_there_is_a_choice_for() -> None:
    draw = np.random.default_rng(3)
    for _ in range(40):
        chain = [Element(int(size), 1.0) for size in draw.integers(1, 9, int(draw.integers(1, 7)))]
        in_flight = int(draw.integers(1, 5))
        least = least_bytes(chain, in_flight)
        assert least == min(cost(chain, in_flight, numbers) for numbers in range(1 << len(chain)))
        assert cheapest(chain, in_flight, least) is not None
        assert cheapest(chain, in_flight, least - 1) is None


def cost(chain: list[Element], in_flight: int, numbers: int) -> int:
    """The bytes at the worst moment where the elements of these bits are kept."""
    kept, run, most = 0, 0, 0
    for i, element in enumerate(chain):
        kept, run = (kept + element.bytes, 0) if numbers >> i & 1 else (kept, run + element.bytes)
        most = max(most, run)
    return in_flight * kept + most
