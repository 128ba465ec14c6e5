"""State in chunks: the same numbers in a store of two levels, updates in parts, and the programs that the verifier
refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from tests.oracles.drawn_chains import chain_model

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module, written_vars
from penstock.ir.memory.items import home_bytes, resident_bytes, stage_images, users_of
from penstock.ir.memory.predict import measure_memory, planned_account
from penstock.ir.memory.update_parts import LAST, share_of_update, update_parts
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.memory.chunks import chunks_of
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

from .test_offload import CASES, DEEP, M, edited, same, trained

ADAMW = {"kind": "adamw", "lr": 0.1}
WIDTHS = [4, *[6] * 11, 4]
PLANS = {
    "1f1b": {},
    "2bw": {},
    "zb-1f1b": {},
    "clipped": {"guard": {"clip": 0.5}},
    "clipped 2bw": {"schedule": "2bw", "guard": {"clip": 0.5}},
    "f16": {"precision": "f16"},
    "sgd": {"optimizer": {"kind": "momentum", "lr": 0.1, "beta": 0.9}},
    "muon": {"optimizer": {"kind": "muon", "lr": 0.1}},
    "plain": {"optimizer": {"kind": "sgd", "lr": 0.1}},
    "one device": {"devices": 1},
}


def planned(case: str, offload: str, memory: int = 0) -> Module:
    how = PLANS[case]
    devices = how.get("devices", 2)
    cluster = replace(Cluster.local(devices), spaces=(Space("disk"),))
    if memory:
        cluster = replace(cluster, devices=tuple(replace(d, spaces=(("ram", memory),)) for d in cluster.devices))
    options = PipelineOptions(
        schedule=how.get("schedule", case if case in CASES and case != "one device" else "1f1b"),
        microbatches=M,
        recompute="none",
        offload=offload,
        guard=how.get("guard"),
        precision=how.get("precision", "f32"),
    )
    calls = training_pipeline(how.get("optimizer", ADAMW), {"split_at": DEEP[2:] if devices > 1 else ()}, options)
    return run_passes(chain_model(WIDTHS, [], rows=2).but(cluster=cluster), calls, PASSES)


@cache
def chunked(case: str) -> Module:
    return planned(case, "state")


@pytest.mark.parametrize("case", [case for case in PLANS if case != "plain"])
def test_numbers_are_the_same_bit_for_bit(case: str) -> None:
    module, whole = chunked(case), planned(case, "none")
    verify(module)
    assert parse_module(print_module(module)) == module
    assert same(trained(module), trained(whole))
    for rank, row in measure_memory(module).items():
        images, before = stage_images(module, rank), measure_memory(whole)[rank]
        assert len(images) > 3
        assert sum(1 for item in images if item.startswith("c")) == len(images)
        held = max(resident_bytes(module, module.schedule.expand(rank, 3)))
        assert 0 < held < home_bytes(module)["disk", "localhost"][rank]
        spared = sum(var.type.nbytes for image in images.values() for var in image.variables.values())
        assert before.state - row.state == spared - held
        # The steps of muon's products are as large as a chunk here, and each part has its own.
        assert row.peak < before.peak or case == "muon"


def test_parts_of_an_update_write_all_that_it_writes_once() -> None:
    module = chunked("clipped")
    update, parts = module.stage_graph(0, "U"), update_parts(module, 0)
    assert update is not None
    assert [*parts] == [*stage_images(module, 0), LAST]
    written = [name for part in parts.values() for name in written_vars(part)]
    assert len(written) == len(set(written))
    assert set(written) == written_vars(update)
    assert parts[LAST].outs == update.outs
    taken = [op.var for part in parts.values() for op in part.ops if op.kind == "take"]
    assert sorted(taken) == sorted(op.var for op in update.ops if op.kind == "take")
    for item, image in stage_images(module, 0).items():
        assert users_of(module, 0, image) == {f"U.{item}"}
        assert image.variables.keys() <= written_vars(parts[item])
    shares = [share_of_update(module, Action("U", 0, 1, item=item)) for item in parts]
    assert sum(shares) == pytest.approx(1)
    assert share_of_update(planned("1f1b", "none"), Action("U", 0, 1)) == 1


def test_at_most_three_chunks_are_on_the_device() -> None:
    module = chunked("one device")
    here: set[str] = set()
    most = 0
    for action in module.schedule.expand(0, 3):
        if action.kind == "CI":
            here.add(action.item)
        elif action.item and action.kind == "L":
            here.discard(action.item)
        most = max(most, len(here))
    assert most == 3
    assert not here
    # Moves of what the batch before left stand in the middle of the computations of the next one.
    kinds = [a.kind for a in module.schedule.ranks[0].batch]
    assert set(kinds[: kinds.index("L")]) & {"F", "B"}
    assert set(kinds[kinds.index("CI") : kinds.index("U")]) & {"F", "B"}


def test_what_gains_nothing_stays() -> None:
    """Adam's state of a parameter is one chunk, so a rank with two parameters has no chunk to spare."""
    module = planned("1f1b", "none")
    assert len(chunks_of(module, 0)) > 3
    names = [name for name, var in module.vars.items() if var.role == "state" and var.stage == 0]
    few = {n: v for n, v in module.vars.items() if n not in names[4:]}
    assert chunks_of(module.but(vars=few), 0) == []
    with pytest.raises(UsageError, match="no rank has optimiser state that could be elsewhere"):
        planned("plain", "state")


def test_many_small_parameters_make_many_chunks() -> None:
    """All are small beside the state of a deep model: those that join a chunk in any case are few."""
    cluster = replace(Cluster.local(1), spaces=(Space("disk"),))
    options = PipelineOptions(microbatches=M, recompute="none", offload="none")
    module = run_passes(
        chain_model([6] * 101, [], rows=2).but(cluster=cluster), training_pipeline(ADAMW, {}, options), PASSES
    )
    chunks = chunks_of(module, 0)
    sizes = [sum(module.vars[name].type.nbytes for name in names) for names in chunks]
    assert len(chunks) >= 5
    assert max(sizes) <= 0.25 * sum(sizes)


# ------------------------------------------------------------------------------------------------ refused programs


def of(kind: str, item: str, becomes: Callable[[Action], Iterable[Action]]) -> Callable[[Module], Module]:
    return lambda module: edited(
        module, lambda _, a: becomes(a) if (a.kind, a.item, a.stage) == (kind, item, 0) else (a,)
    )


def swapped(module: Module, first: str, second: str) -> Module:
    """Exchange an action with the one behind it."""

    def turned(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        listed = list(actions)
        at = next(
            i for i, a in enumerate(listed) if f"{a.computation}:{a.item}" == first or f"{a.kind}:{a.item}" == first
        )
        assert f"{listed[at + 1].kind}:{listed[at + 1].item}" == second
        listed[at : at + 2] = listed[at : at + 2][::-1]
        return tuple(listed)

    program = module.schedule.ranks[0]
    ranks = {**module.schedule.ranks, 0: replace(program, batch=turned(program.batch))}
    return module.but(schedule=replace(module.schedule, ranks=ranks))


def forward_between(module: Module) -> Module:
    """A forward of the next batch stands between two parts of an update that overwrites what it reads."""
    program = module.schedule.ranks[0]
    first = next(a for a in program.batch if a.kind == "F")
    later = first._replace(mb=first.mb + M, version=first.version + 1)
    at = next(i for i, a in enumerate(program.batch) if a.kind == "U" and a.item == "c1")
    batch = [a for a in program.batch if a != first]
    batch.insert(at, later)
    ranks = {**module.schedule.ranks, 0: replace(program, start=(first,), batch=tuple(batch))}
    return module.but(schedule=replace(module.schedule, ranks=ranks))


REFUSED = {
    "a CI left out": (of("CI", "c1", lambda a: ()), r"takes @.*, which is at home in disk \(no 0CI0:c1 before\)"),
    "a CO left out": (of("CO", "c1", lambda a: ()), r"only copy of @.*, which 0U0@1:c1 changed \(no 0CO0:c1 before\)"),
    "L of another chunk one action earlier": (lambda m: swapped(m, "CO:c1", "L:c0"), ""),
    "a CO behind its L": (
        of("CO", "c1", lambda a: (a._replace(kind="L"), a)),
        r"lets go of the only copy of @.*, which 0U0@1:c1 changed",
    ),
    "a chunk of another stage": (
        of("CI", "c1", lambda a: (a._replace(stage=1),)),
        "rank 0: runs stages 0, 1, expected one",
    ),
    "another chunk": (of("CI", "c1", lambda a: (a._replace(item="c2"),)), "brings what is on the device since"),
    "no such chunk": (of("CI", "c1", lambda a: (a._replace(item="c99"),)), "stage 0 has no c99 with a home"),
    "a part left out": (of("U", "c1", lambda a: ()), r"ends the update before its part 0U0:c1"),
    "a part twice": (of("U", "c1", lambda a: (a, a)), "was already done at step"),
    "no such part": (
        of("U", "c1", lambda a: (a, a._replace(item="c99"))),
        "the update of stage 0 has no part c99",
    ),
    "a part too late": (
        lambda m: edited(m, lambda _, a: () if a.item == "c1" and a.kind == "U" and a.stage == 0 else behind(a)),
        r"ends the update before its part 0U0:c1",
    ),
    "a forward between parts": (forward_between, r"reads version \d of @.*, which (is made only later|version \d has)"),
}


def behind(a: Action) -> tuple[Action, ...]:
    return (a, a._replace(item="c1")) if a.kind == "U" and not a.item and a.stage == 0 else (a,)


@pytest.mark.parametrize("how", REFUSED)
def test_the_verifier_refuses(how: str) -> None:
    change, message = REFUSED[how]
    changed = change(chunked("1f1b"))
    if not message:  # the control of the controls: another legal order
        verify(changed)
        return
    with pytest.raises(VerifyError, match=message):
        verify(changed)


@pytest.mark.parametrize("how", ["a CI left out", "a CO left out", "a CO behind its L", "a part left out"])
def test_the_interpreter_shows_what_the_verifier_refuses(how: str) -> None:
    change, _ = REFUSED[how]
    try:
        found = trained(change(chunked("1f1b")))
    except VerifyError:
        return
    assert not same(found, trained(planned("1f1b", "none")))


def test_chunks_that_belong_together_are_refused_apart() -> None:
    """The two states of a parameter in two chunks: one operation of the update makes both."""
    module = chunked("1f1b")
    name = next(n for n, var in module.vars.items() if var.chunk == 0 and n.endswith("adam_m"))
    torn = module.but(vars={**module.vars, name: replace(module.vars[name], chunk=1)})
    with pytest.raises(VerifyError, match=r"c0 and c1 are made of @.* together, so they cannot be apart"):
        verify(torn)


def test_one_byte_less_is_refused() -> None:
    peak = max(row.peak for row in measure_memory(chunked("1f1b")).values())
    verify(planned("1f1b", "state", memory=peak))
    with pytest.raises(DoesNotFit, match="at the worst moment"):
        planned("1f1b", "state", memory=peak - 1)
    with pytest.raises(DoesNotFit, match="at the worst moment"):  # nor does it fit when nothing moves
        planned("1f1b", "none", memory=peak)


def test_the_account_has_a_chunk_only_while_it_is_there() -> None:
    module = chunked("1f1b")
    account = planned_account(module, 1, [(0, 3)])
    for item, image in stage_images(module, 1).items():
        stays = [life for life in account.lives if life.names[0] in image.variables]
        assert len(stays) == 3 * len(image.variables)
        for life in stays:
            assert life.given_at is not None
            assert {account.actions[step].item for step in (life.taken_at, life.given_at, *life.uses)} == {item}
            assert [account.actions[step].kind for step in life.uses] == ["CI", "U", "CO"]
