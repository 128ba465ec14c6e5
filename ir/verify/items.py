"""The checker of items that move between memory spaces.

In: a module with a schedule. It follows every rank's actions in concrete runs (runs.py), and knows of each item of a
stage: is it on the device, and has it changed since it was copied to its home?

    resident   a computation that touches an item stands behind its CI, and before its L
    home       L lets go of no only copy: CO stands behind the last computation that changed it
    once       nothing is brought that is there, but weights, which are claimed; nothing is copied out that did not
               change, or let go of that is away; and each CI has its L
    seam       a run ends with every item at home, where a checkpoint takes it from
    version    of weights in two versions the one that is read is brought, is at home then, and room for the one that is
               made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, GRADIENTS_ITEM, LET_GO, STATE_ITEM, UPDATE, WEIGHTS_ITEM
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import GRAD, PARAM, REPLICAS, STATE, Module, summed_vars
from penstock.ir.memory.items import Image, changers_of, home_bytes, is_made_later, stage_images, users_of, version_read
from penstock.ir.memory.saved_sets import moves_saved, saved_set
from penstock.ir.memory.update_parts import update_parts
from penstock.ir.schedule import Action
from penstock.support.errors import UsageError, VerifyError
from penstock.support.words import counted, exact_bytes, shown_bytes

from .problems import Problem
from .runs import ConcreteRun, FirstOfEach, over_runs
from .saved_sets import check_saved_sets


def check_items(module: Module) -> Iterator[Problem]:
    """Check what has a home, and every move of it."""
    assert module.schedule is not None
    moving = any(a.item for a in module.schedule.actions())
    if not moving and not any(var.home for var in module.vars.values()) and not any(s.home for s in module.stages):
        return
    problems = [*_check_homes(module)]
    yield from problems
    if not problems:
        yield from over_runs(module, _check_moves)
        yield from over_runs(module, check_saved_sets)


def _check_homes(module: Module) -> Iterator[Problem]:
    """Check that variables with a home are optimiser state of a stage, and that its ranks reach that space."""
    for name, var in module.vars.items():
        if var.home and (var.role not in (STATE, PARAM, GRAD) or var.stage is None):
            yield Problem(f"@{name}", f"is at home in {var.home}; only what one stage trains can be")
        elif var.home and var.versions > 1 and var.role != PARAM:
            yield Problem(f"@{name}", f"is at home in {var.home} in {var.versions} versions, expected one")
    for stage in module.stages:
        where = f"stage {stage.index}"
        replicas = module.mesh_of(stage.index).sizes.get(REPLICAS, 1)
        for name in summed_vars(module, stage.index) if replicas > 1 else ():
            if module.vars[name].home:
                yield Problem(f"@{name}", f"is at home in {module.vars[name].home}, and replicas of {where} sum it up")
        try:
            update_parts(module, stage.index)
        except VerifyError as error:
            yield Problem(where, error.what)
            continue
        images, saved = stage_images(module, stage.index), saved_set(module, stage.index)
        if stage.home and saved is None:
            yield Problem(where, f"saves to {stage.home}, and its forward saves nothing that could be there")
        for item, image in images.items():
            if item in (WEIGHTS_ITEM, GRADIENTS_ITEM):
                continue
            expected = UPDATE if item == STATE_ITEM else f"{UPDATE}.{item}"
            if users := users_of(module, stage.index, image) - {expected}:
                yield Problem(where, f"{', '.join(sorted(users))} touches state that is at home in {image.space}")
        if len(spaces := {var.home for image in images.values() for var in image.variables.values()}) > 1:
            yield Problem(where, f"has state in {' and '.join(sorted(spaces))}, expected one space")
        for item, image in images.items():
            if len({var.versions for var in image.variables.values()}) > 1:
                yield Problem(where, f"has {item} at home of variables with different numbers of versions")
        names = {image.space for image in images.values()} | ({saved.space} if saved is not None else set())
        for device in module.devices_of(stage.index) if module.cluster is not None else ():
            for space in sorted(names):
                yield from _check_reach(module.cluster, device, space, where)


def _check_reach(cluster: Cluster | None, name: str, space: str, where: str) -> Iterator[Problem]:
    assert cluster is not None
    try:
        cluster.space(space, name)
    except UsageError as error:
        yield Problem(where, error.what, hint=error.hint)


@dataclass(slots=True)
class _VersionState:
    """A version of an item on a rank: the step that brought it to the device and how often that is claimed, and the
    action that changed it since it was last copied out."""

    brought: int
    claims: int = 1
    changed: Action | None = None


@dataclass(slots=True)
class _ItemState:
    """The state of an item on a rank: the versions of it on the device, and those at home, by place. Items with one
    version are in version None. `users` touch it, and `changers` change it."""

    name: str
    image: Image
    users: frozenset[str]
    changers: frozenset[str]
    here: dict[int | None, _VersionState]
    home: dict[int, int]

    @property
    def example(self) -> str:
        return f"@{min(self.image.variables)}"

    def shown(self, version: int | None) -> str:
        return self.example if version is None else f"version {version} of {self.example}"

    def version_of(self, a: Action) -> int | None:
        """Return the version that an action moves or reads."""
        return None if self.image.versions == 1 else version_read(a)


class _Moves:
    """The checker of one rank in one run."""

    def __init__(self, run: ConcreteRun, rank: int, items: Mapping[int, Mapping[str, _ItemState]]) -> None:
        self._run, self._rank, self._items = run, rank, items
        self._problem = FirstOfEach(run, rank)

    def check(self, actions: list[Action]) -> Iterator[Problem]:
        for step, a in enumerate(actions):
            items = self._items.get(a.stage, {})
            if moves_saved(a):
                continue
            move, moved = MOVED.get(a.kind) if a.item else None, items.get(a.item)
            if move is not None and moved is None:
                yield from self._problem("nothing", step, f"stage {a.stage} has no {a.item} with a home")
            elif move is not None and moved is not None and (a.version is None) != (moved.image.versions == 1):
                what = "names no version of" if a.version is None else "names a version of"
                count = counted(moved.image.versions, "version")
                yield from self._problem("version", step, f"{what} {moved.example}, of which there is {count}")
            elif move is not None and moved is not None:
                yield from move(self, step, a, moved)
            for item in items.values() if move is None else ():
                if a.computation in item.users:
                    yield from self._touch(step, a, item)
        for stage, items in self._items.items():
            for item in items.values():
                for version in item.here:
                    which = "" if version is None else f" in version {version}"
                    what = f"never lets go of {item.name} of stage {stage}{which}, which it brought"
                    yield self._run.missing(self._rank, what)

    def _touch(self, step: int, a: Action, item: _ItemState) -> Iterator[Problem]:
        version = item.version_of(a)
        touched = item.here.get(version)
        if touched is None:
            missing = f"{a.stage}{COPY_IN}{a.mb if a.once else a.batch(self._run.schedule.microbatches)}"
            missing += f":{item.name}" if version is None else f"@{version}:{item.name}"
            what = f"takes {item.shown(version)}, which is at home in {item.image.space} (no {missing} before)"
            yield from self._problem("away", step, what)
        if version is not None and a.kind == UPDATE:
            touched = item.here.get(a.version)
            if touched is None:
                missing = f"{a.stage}{COPY_IN}{a.mb}@{a.version}:{item.name}"
                what = f"makes {item.shown(a.version)}, which has no memory on the device (no {missing} before)"
                yield from self._problem("room", step, what)
        if touched is not None and a.computation in item.changers:
            touched.changed = a
        elif touched is not None and item.image.is_zero and a.kind == UPDATE:
            touched.changed = None

    def bring(self, step: int, a: Action, item: _ItemState) -> Iterator[Problem]:
        there = item.here.get(a.version)
        if there is not None and not item.image.holds_weights:
            yield from self._problem("here", step, f"brings what is on the device since step {there.brought}")
        if there is not None:
            there.claims += 1
            return
        if a.version is not None:
            place = a.version % item.image.versions
            other = next((v for v in item.here if v is not None and v % item.image.versions == place), None)
            if other is not None:
                what = f"brings {item.shown(a.version)} while version {other}, in the place of it, is on the device"
                yield from self._problem("place", step, what)
            elif not is_made_later(a) and item.home.get(place) != a.version:
                what = f"brings {item.shown(a.version)}, and at home in its place is version {item.home.get(place)}"
                yield from self._problem("gone", step, what)
        item.here[a.version] = _VersionState(step)

    def store(self, step: int, a: Action, item: _ItemState) -> Iterator[Problem]:
        there = item.here.get(a.version)
        if there is None:
            yield from self._problem("away", step, f"copies {item.shown(a.version)}, which is not on the device")
            return
        if item.image.is_zero:
            yield from self._problem("zero", step, f"copies {item.example}, and gradients have no copy at home")
        elif there.changed is None:
            what = f"copies {item.shown(a.version)}, which nothing changed since it is at home"
            yield from self._problem("same", step, what)
        there.changed = None
        if a.version is not None:
            item.home[a.version % item.image.versions] = a.version

    def let_go(self, step: int, a: Action, item: _ItemState) -> Iterator[Problem]:
        there = item.here.get(a.version)
        if there is None:
            yield from self._problem("away", step, f"lets go of {item.shown(a.version)}, which is not on the device")
            return
        there.claims -= 1
        if there.claims:
            return
        if there.changed is not None:
            stored = f"{a.stage}{COPY_OUT}{there.changed.mb}"
            stored += f":{item.name}" if a.version is None else f"@{a.version}:{item.name}"
            what = (
                f"lets go of the only copy of {item.shown(a.version)}, which {there.changed} changed "
                f"(no {stored} before)"
            )
            yield from self._problem("only", step, what)
        del item.here[a.version]


# The check of every action that names an item.
MOVED: dict[str, Callable[[_Moves, int, Action, _ItemState], Iterator[Problem]]] = {
    COPY_IN: _Moves.bring,
    COPY_OUT: _Moves.store,
    LET_GO: _Moves.let_go,
}


def _check_moves(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    users = {
        (stage.index, item): (users_of(module, stage.index, image), changers_of(module, stage.index, image))
        for stage in module.stages
        for item, image in stage_images(module, stage.index).items()
    }
    for rank, actions in run.programs.items():
        items = {
            stage: {
                item: _ItemState(item, image, *users[stage, item], {}, _at_first(run.first, image))
                for item, image in stage_images(module, stage).items()
            }
            for stage in sorted({a.stage for a in actions})
        }
        yield from _Moves(run, rank, items).check(actions)


def _at_first(first: int, image: Image) -> dict[int, int]:
    """Return the versions that are at home as a run begins, by place: the newest, and those before it."""
    return {v % image.versions: v for v in range(max(0, first + 1 - image.versions), first + 1)}


def check_spaces(module: Module) -> Iterator[Problem]:
    """Check that what ranks have at home fits into each space, and into what a device may have of it."""
    if module.cluster is None:
        return
    devices = module.rank_devices()
    for (name, _), held in home_bytes(module).items():
        space = module.cluster.space(name, devices[min(held)])
        yield from _check_room(f"space {name}", space.bytes, held)
        by_device: dict[str, dict[int, int]] = {}
        for rank, nbytes in held.items():
            by_device.setdefault(devices[rank], {})[rank] = nbytes
        for device, of_ranks in by_device.items():
            room = dict(module.cluster.device(device).spaces[1:]).get(name, 0)
            yield from _check_room(f"space {name} of device {device}", room, of_ranks)


def _check_room(where: str, room: int, held: Mapping[int, int]) -> Iterator[Problem]:
    """Check that ranks have room for so many bytes; a room of 0 has no limit."""
    if room and sum(held.values()) > room:
        parts = ", ".join(f"rank {rank} {shown_bytes(nbytes)}" for rank, nbytes in held.items())
        what = f"is home to {exact_bytes(sum(held.values()))} ({parts}), it has {exact_bytes(room)}"
        yield Problem(where, what, hint="a larger space, or --offload none", memory=True)
