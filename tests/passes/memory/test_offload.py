"""State that is elsewhere between updates: the same numbers in a store of two levels, the programs that the verifier
refuses, and the memory of every space."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.oracles.drawn_chains import chain_model

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.memory.items import home_bytes, stage_images
from penstock.ir.memory.predict import measure_memory, memory_curve, planned_account
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.memory.offload import OffloadOptions, offload, with_homes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

M, WIDTHS = 4, [4, *[6] * 7, 4]
DEEP = tuple(f"layer{i}" for i in range(2, 8, 2))
CASES = {
    "1f1b": ("1f1b", 4, 1),
    "2bw": ("2bw", 4, 1),
    "zb-1f1b": ("zb-1f1b", 4, 1),
    "interleaved": ("interleaved", 2, 2),
    "zb-v": ("zb-v", 2, 2),
    "interleaved-2bw": ("interleaved-2bw", 2, 2),
    "one device": ("interleaved", 1, 4),
}


@cache
def compiled(case: str, recompute: str = "none", moves: bool = False, clip: bool = False) -> Module:
    return planned(case, recompute, "state" if moves else "none", clip)


def planned(
    case: str, recompute: str, offload: str, clip: bool = False, memory: int = 0, space: Space | None = None
) -> Module:
    schedule, devices, packs = CASES[case]
    cluster = Cluster.local(devices)
    if memory:
        cluster = replace(cluster, devices=tuple(replace(d, spaces=(("ram", memory),)) for d in cluster.devices))
    cluster = replace(cluster, spaces=(space or Space("disk"),))
    guard = {"clip": 0.5} if clip else None
    options = PipelineOptions(
        schedule=schedule, microbatches=M, packs=packs, recompute=recompute, offload=offload, guard=guard
    )
    calls = training_pipeline({"kind": "adamw", "lr": 0.1}, {"split_at": DEEP}, options)
    return run_passes(chain_model(WIDTHS, [], rows=2).but(cluster=cluster), calls, PASSES)


def let_sets_go(patch: pytest.MonkeyPatch) -> None:
    """Let what forwards saved go also where no device needs less memory for it, as in small programs."""
    patch.setattr("penstock.passes.memory.offload._moved_for_nothing", lambda *_: iter(()))


@cache
def moved(case: str) -> Module:
    """A program whose state is elsewhere on every stage, also where nothing is gained by that."""
    whole = compiled(case)
    return with_homes(whole, [stage.index for stage in whole.stages])


def trained(module: Module, m: int = M):
    draw = np.random.default_rng(5)
    params = [name for name, var in module.vars.items() if var.role == "param"]
    weights = {n: draw.standard_normal(module.vars[n].type.dims).astype("f4") for n in params}
    batches = [
        {v.name: draw.standard_normal((2 * m, *v.type.dims[1:])).astype("f4") for v in module.data_inputs}
        for _ in range(4)
    ]
    return run_schedule(module, weights, batches, precision=TYPED)


def same(one, other) -> bool:
    return one.losses == other.losses and all(
        np.array_equal(array, other.variables[name]) for name, array in one.variables.items()
    )


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_bit_for_bit(case: str) -> None:
    module = moved(case)
    verify(module)
    assert parse_module(print_module(module)) == module
    assert same(trained(module), trained(compiled(case)))


@pytest.mark.parametrize(
    ("case", "recompute", "clip"),
    [
        ("interleaved", "none", False),
        ("interleaved", "none", True),
        ("interleaved", "all", True),
        ("zb-v", "all", False),
        ("interleaved-2bw", "none", False),
        ("interleaved-2bw", "all", True),
        ("one device", "none", False),
    ],
)
def test_the_pass_lets_ranks_of_packs_train_with_one_state_or_two_at_a_time(
    case: str, recompute: str, clip: bool
) -> None:
    """Beside what is computed again, and with updates that wait for the norm of all stages. Two are there on one device:
    one computation alone is between two of its updates."""
    module, whole = compiled(case, recompute, True, clip), compiled(case, recompute, clip=clip)
    verify(module)
    assert same(trained(module), trained(whole))
    for rank, row in measure_memory(module).items():
        before, pack = measure_memory(whole)[rank], module.rank_packs()[rank]
        sizes = [image.nbytes for stage in pack if (image := stage_images(module, stage).get("o"))]
        assert len(sizes) == len(pack)
        spared = sum(var.type.nbytes for stage in pack for var in stage_images(module, stage)["o"].variables.values())
        here = sorted(sizes)[-2:] if case == "one device" else [max(sizes)]
        assert before.state - row.state == spared - sum(here) > 0
        assert row.peak < before.peak
        assert home_bytes(module)["disk", "localhost"][rank] == sum(sizes)


def test_updates_that_wait_for_nothing_come_early() -> None:
    """So that copies of one stage pass while gradients of another are computed."""
    schedule = compiled("interleaved", moves=True).schedule
    assert schedule is not None
    for program in schedule.ranks.values():
        places = [i for i, a in enumerate(program.batch) if a.kind == "U"]
        between = {a.kind for a in program.batch[places[0] : places[1]]}
        assert "B" in between


def test_what_gains_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no rank has optimiser state that could be elsewhere"):
        offload(compiled("1f1b").but(vars={n: v for n, v in compiled("1f1b").vars.items() if v.role != "state"}))
    with pytest.raises(UsageError, match="reaches no memory space 'tape'"):
        offload(compiled("interleaved"), OffloadOptions("tape"))


def test_gpus_have_their_homes_in_memory_of_the_host() -> None:
    """The controls: files are for CPUs, a home in files is refused, and so is a host that is a byte too small."""
    whole = compiled("interleaved")
    assert whole.cluster is not None
    gpus = replace(whole.cluster, devices=tuple(replace(d, kind="cuda") for d in whole.cluster.devices))
    with pytest.raises(UsageError, match=r"cpu:0 reaches no memory space.*\n.*\[\[space\]\] of kind ram"):
        offload(whole.but(cluster=gpus))
    (disk,) = gpus.spaces
    dram = Space.from_fields("dram", {"kind": "ram"})
    module = offload(whole.but(cluster=replace(gpus, spaces=(disk, dram))))
    verify(module)
    assert {var.home for var in module.vars.values()} == {"", "dram"}
    assert same(trained(module), trained(whole))
    held = home_bytes(module)["dram", "localhost"]
    for bytes, fits in ((sum(held.values()), True), (sum(held.values()) - 1, False)):
        small = module.but(cluster=replace(gpus, spaces=(replace(dram, bytes=bytes),)))
        if fits:
            verify(small)
        else:
            with pytest.raises(DoesNotFit, match="space dram: is home to"):
                verify(small)
    named = {n: replace(v, home="disk") if v.home else v for n, v in module.vars.items()}
    with pytest.raises(VerifyError, match="device cpu:0 reaches no memory space 'disk' of kind 'ram'"):
        verify(module.but(vars=named))


def test_each_kind_of_device_has_homes_of_its_own_kind() -> None:
    """A space that is named is that of the devices that reach it. Of no stage's device, it is refused."""
    whole = compiled("interleaved")
    assert whole.cluster is not None
    first, second = whole.cluster.devices
    (disk,) = whole.cluster.spaces
    spaces = (disk, *(Space.from_fields(name, {"kind": "ram"}) for name in ("dram", "far")))
    mixed = whole.but(cluster=replace(whole.cluster, devices=(first, replace(second, kind="cuda")), spaces=spaces))
    for name, expected in (("", {"disk", "dram"}), ("disk", {"disk", "dram"}), ("far", {"disk", "far"})):
        module = offload(mixed, OffloadOptions(name))
        verify(module)
        assert {space for space, _ in home_bytes(module)} == expected
    with pytest.raises(UsageError, match="reaches no memory space 'tape'"):
        offload(mixed, OffloadOptions("tape"))


# ------------------------------------------------------------------------------------------------ refused programs


def edited(module: Module, rule: Callable[[int, Action], Iterable[Action]]) -> Module:
    assert module.schedule is not None
    return module.but(schedule=module.schedule.rewrite_ranks(rule))


def without(kind: str) -> Callable[[Module], Module]:
    return lambda module: edited(module, lambda _, a: () if a.item and a.kind == kind and a.stage == 2 else (a,))


def early(module: Module) -> Module:
    """L stands in front of its CO."""
    rows = {"CO": lambda a: (a._replace(kind="L"), a), "L": lambda a: ()}
    return edited(module, lambda _, a: rows[a.kind](a) if a.item and a.kind in rows else (a,))


def of_another_stage(module: Module) -> Module:
    return edited(module, lambda _, a: (a._replace(stage=0),) if a.kind == "CI" and a.stage == 2 else (a,))


def twice(module: Module) -> Module:
    return edited(module, lambda _, a: (a, a) if a.kind == "CI" else (a,))


def unchanged(module: Module) -> Module:
    return edited(module, lambda _, a: (a, a) if a.kind == "CO" else (a,))


def left(module: Module) -> Module:
    """The item stays after the last update: no L of any batch, and no second CI."""
    return edited(module, lambda _, a: () if a.item and a.kind == "L" else (a,))


REFUSED = {
    "a CI left out": (without("CI"), r"takes @.*, which is at home in disk \(no 2CI\d:o before\)"),
    "a CO left out": (without("CO"), r"lets go of the only copy of @.*, which 2U.* changed \(no 2CO\d:o before\)"),
    "L one action early": (early, r"lets go of the only copy of @"),
    "of another stage": (of_another_stage, r"brings what is on the device since|which is at home in disk"),
    "brought twice": (twice, "brings what is on the device since step"),
    "not changed": (unchanged, "which nothing changed since it is at home"),
    "never let go of": (left, "never lets go of o of stage"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_the_verifier_refuses(how: str) -> None:
    change, message = REFUSED[how]
    with pytest.raises(VerifyError, match=message):
        verify(change(moved("interleaved")))


def test_nothing_moves_that_has_no_home() -> None:
    module = moved("interleaved")
    with pytest.raises(VerifyError, match="stage 2 has no o with a home"):
        verify(_at_home(module, 2, ""))
    with pytest.raises(VerifyError, match="reaches no memory space 'tape'"):
        verify(_at_home(module, 2, "tape"))
    weight = next(name for name, var in module.vars.items() if var.role == "setting")
    parameter = module.but(vars={**module.vars, weight: replace(module.vars[weight], home="disk")})
    with pytest.raises(VerifyError, match="only what one stage trains can be"):
        verify(parameter)


def _at_home(module: Module, stage: int, home: str) -> Module:
    changed = {n: replace(v, home=home) for n, v in module.vars.items() if v.home and v.stage == stage}
    return module.but(vars={**module.vars, **changed})


@pytest.mark.parametrize("change", [without("CI"), without("CO"), early])
def test_the_interpreter_shows_what_the_verifier_refuses(change) -> None:
    """Memory that was given back holds no numbers, and what was not copied out is lost: the judges agree."""
    assert not same(trained(change(moved("interleaved"))), trained(compiled("interleaved")))


# ------------------------------------------------------------------------------------------------ memory


def test_one_byte_less_is_refused() -> None:
    peak = max(row.peak for row in measure_memory(compiled("interleaved", moves=True)).values())
    whole = max(row.peak for row in measure_memory(compiled("interleaved")).values())
    assert peak < whole
    verify(planned("interleaved", "none", "state", memory=peak))
    with pytest.raises(DoesNotFit, match="at the worst moment"):
        planned("interleaved", "none", "state", memory=peak - 1)
    with pytest.raises(DoesNotFit, match="at the worst moment"):  # nor does it fit when nothing moves
        planned("interleaved", "none", "none", memory=peak)


def test_a_space_has_room_for_what_all_ranks_have_there() -> None:
    held = sum(home_bytes(compiled("interleaved", moves=True))["disk", "localhost"].values())
    verify(planned("interleaved", "none", "state", space=Space("disk", bytes=held)))
    with pytest.raises(DoesNotFit, match=rf"space disk: is home to .*\({held} bytes\)"):
        planned("interleaved", "none", "state", space=Space("disk", bytes=held - 1))
    module = compiled("interleaved", moves=True)
    assert module.cluster is not None
    first, *others = module.cluster.devices
    limited = replace(first, spaces=(("ram", 1 << 30), ("disk", held // 2 - 1)))
    with pytest.raises(DoesNotFit, match="space disk of device cpu:0: is home to"):
        verify(module.but(cluster=replace(module.cluster, devices=(limited, *others))))


def test_the_account_has_state_only_while_it_is_there() -> None:
    module = moved("1f1b")
    image = stage_images(module, 1)["o"]
    account = planned_account(module, 1, [(0, 3)])
    stays = [life for life in account.lives if life.names[0] in image.variables]
    assert len(stays) == 3 * len(image.variables)
    for life in stays:
        assert account.actions[life.taken_at].kind == "CI"
        assert life.given_at is not None
        assert account.actions[life.given_at].kind == "L"
        assert [account.actions[step].kind for step in life.uses] == ["CI", "U", "CO"]
    live = [point[1] for point in memory_curve(module, 1, 3)]
    moves = {i: a.kind for i, a in enumerate(account.actions) if a.item}
    for step, kind in moves.items():
        if kind != "CO":
            assert live[step] - live[step - 1] == image.nbytes * (1 if kind == "CI" else -1)
