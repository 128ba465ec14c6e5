"""Give optimiser state, or what forwards saved, a home in another memory space, and move it to the device for its use:
the pass `offload`.

In: a wired schedule. Out: variables and stages with a home, and the actions that move them: copy in, update, copy out,
let go. What is on the device at once depends on what else a rank has to do. Saved sets are those of
saved_elsewhere.py, of ranks that need less memory for it; what follows is about state.

A rank that runs several stages has the state `o` of one of them at a time: `CI:o U CO:o L:o`. That of a stage comes
when that of the stage before it is let go of. L waits for CO and U for CI, so both stand in the middle of the
computations between the two updates, those of one batch or of two. U of a stage that takes nothing from others comes
right behind its last gradient, so that there are some. Where there is one alone, the middle hides one of both copies at
most. CI then stands behind the update before and L behind the next one, so two states are on the device at once. Where
that is too much for the memory of a device, the state of one is.

A rank with one stage has its state in chunks, `c0`, `c1` and so on (chunks.py), and updates one after the other, by
parts of its update.

Where devices have too little memory for all saved sets, no more of these go than that asks for; then weights stay as
far as there is room (weights/room.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import BACKWARD, COPY_IN, COPY_OUT, LET_GO, STATE_ITEM, SUM, UPDATE
from penstock.ir.batch_shares import updating_stages
from penstock.ir.cluster.spaces import SPACE_KINDS
from penstock.ir.graph import Module
from penstock.ir.memory.saved_sets import saved_set
from penstock.ir.schedule import ADDERS, COMPUTE, SENDS, Action, Program, Schedule
from penstock.support.errors import UsageError

from .chunks import chunks_of, middle_of, movable_state, with_chunks
from .notes_elsewhere import with_notes
from .overlap_that_fits import fits_devices, later_peaks, too_small
from .saved_elsewhere import (
    AwaySets,
    Numbers,
    longest_away,
    with_saved_sets,
    without_moves,
    without_saved_sets,
)
from .weights.elsewhere import movable_weights, with_weights
from .weights.room import with_weights_that_stay

STATE, ACTIVATIONS, BOTH, WEIGHTS, ALL = KINDS = ("state", "activations", "both", "weights", "all")
# Those that move weights, and the fewest stages of a device that weights move on: it has those of two at once.
MOVE_WEIGHTS, FEWEST_STAGES = (WEIGHTS, ALL), 3


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Options of `offload`. `space` is the home by its name: the first that a device reaches if not given. `what` is
    state, activations, which are what forwards saved, or both; weights are weights, gradients and state, all is all."""

    space: str = ""
    what: str = STATE


def offload(module: Module, options: OffloadOptions = OffloadOptions()) -> Module:
    """Give optimiser state or saved sets a home in another memory space, and move them to the device for their use."""
    if options.what not in KINDS:
        raise UsageError(f"unknown {options.what!r}, expected one of {', '.join(KINDS)}", where="offload")
    if module.schedule is None or module.cluster is None:
        raise UsageError("the module has no schedule", where="offload", hint="run the schedule pass first")
    result = _moved_away(module, options, ahead=True)
    if any(module.cluster.device(name).memory for name in module.rank_devices()):
        tight = _moved_away(module, options, ahead=False)
        ahead = result == tight or fits_devices(result)
        result = _as_few_sets(module, options, result if ahead else tight, ahead=ahead)
        if options.what in MOVE_WEIGHTS:
            result = with_weights_that_stay(result)
    return with_notes(result)


def _moved_away(module: Module, options: OffloadOptions, *, ahead: bool) -> Module:
    if options.what not in (ACTIVATIONS, BOTH, ALL):
        return _without_variables(module, options, ahead=ahead)
    alone = options.what != ALL
    stages = [stage.index for stage in module.stages if module.stage_graph(stage.index, BACKWARD) is not None]
    result = _without_variables(_without_saved_sets(module, stages, options.space, alone=alone), options, ahead=ahead)
    moved, kept = later_peaks(result), later_peaks(_without_variables(module, options, ahead=ahead))
    idle = set(_moved_for_nothing(kept, moved, result))
    if not idle:
        return result
    if alone and not any(stage.home for stage in result.stages if stage.index not in idle):
        ranks = [rank for rank, pack in enumerate(module.rank_packs()) if idle.intersection(pack)]
        rank = max(ranks, key=lambda rank: moved[rank] - kept[rank])
        raise UsageError(
            "what forwards saved takes no less memory elsewhere, as so few microbatches wait for their backward: with "
            f"its copies rank {rank} needs {moved[rank]} bytes, without them {kept[rank]}",
            where="offload",
            hint="take more microbatches or more stages, or --offload state",
        )
    stages = [stage for stage in stages if stage not in idle]
    return _without_variables(_without_saved_sets(module, stages, options.space, alone=False), options, ahead=ahead)


def _as_few_sets(module: Module, options: OffloadOptions, most: Module, *, ahead: bool) -> Module:
    """Return a module with no more saved sets elsewhere than memory asks for, where devices have too little for all of
    them and enough with `most` elsewhere. Those that are away during most computations go, and all of devices whose
    memory is not stated."""
    groups = longest_away(most)
    if not groups or too_small(most) or not too_small(_without_variables(module, options, ahead=ahead)):
        return most
    homes = [stage.index for stage in most.stages if stage.home]

    def moved(counts: Sequence[int]) -> Module:
        numbers: dict[int, set[int]] = {}
        for group, count in zip(groups, counts, strict=True):
            for stage, number in group.sets[:count]:
                numbers.setdefault(stage, set()).add(number)
        sets = _without_saved_sets(module, homes, options.space, alone=False, moving=numbers)
        return _without_variables(sets, options, ahead=ahead)

    return _with_fewest(module, most, groups, moved)


def _with_fewest(
    module: Module, most: Module, groups: Sequence[AwaySets], moved: Callable[[Sequence[int]], Module]
) -> Module:
    """Return a module with as few sets of each group elsewhere as memory asks for. `moved` has the first of each group
    elsewhere, so many, and `most` all."""
    assert module.cluster is not None
    devices = [{most.rank_devices()[rank] for rank in group.ranks} for group in groups]
    # So many sets of each group are too few, and so many are enough.
    enough = [len(group.sets) for group in groups]
    limited = [all(module.cluster.device(name).memory for name in names) for names in devices]
    few = [-1 if limit else count - 1 for limit, count in zip(limited, enough, strict=True)]
    while any(most_known - least_known > 1 for least_known, most_known in zip(few, enough, strict=True)):
        tried = [max(low + 1, (low + high) // 2) for low, high in zip(few, enough, strict=True)]
        short = too_small(moved(tried))
        for group, count in enumerate(tried):
            if enough[group] - few[group] > 1:
                (few if short & devices[group] else enough)[group] = count
    result = moved(enough)
    return most if too_small(result) else result


def with_fewer_sets(module: Module, changed: Collection[int], *, as_asked: bool) -> Module:
    """Return the module with no more saved sets elsewhere than memory asks for, of stages that save less now. Where it
    asks for none, none are, or all of them `as_asked`."""
    groups = [group for group in longest_away(module) if not {stage for stage, _ in group.sets}.isdisjoint(changed)]
    if not groups or too_small(module):
        return module
    if as_asked and not too_small(without_moves(module, {one for group in groups for one in group.sets})):
        return module

    def moved(counts: Sequence[int]) -> Module:
        pairs = zip(groups, counts, strict=True)
        return without_moves(module, {one for group, count in pairs for one in group.sets[count:]})

    return _with_fewest(module, module, groups, moved)


def _moved_for_nothing(kept: Mapping[int, int], moved: Mapping[int, int], module: Module) -> Iterator[int]:
    """Yield the stages whose saved sets are elsewhere though that of their ranks which needs most needs no less memory
    for it. `kept` and `moved` are the bytes of ranks without and with that."""
    packs, room = module.rank_packs(), _rooms(module)
    for pack in dict.fromkeys(map(tuple, packs)):
        ranks = [rank for rank, other in enumerate(packs) if tuple(other) == pack]
        if max(moved[rank] / room[rank] for rank in ranks) >= max(kept[rank] / room[rank] for rank in ranks):
            yield from (stage.index for stage in module.stages if stage.index in pack and stage.home)


def without_idle_sets(module: Module, changed: Collection[int]) -> Module:
    """Return the module with saved sets of these stages, and others of their ranks, elsewhere only where there is one
    still, and ranks need less memory for that."""
    gone = [stage.index for stage in module.stages if stage.home and saved_set(module, stage.index) is None]
    result = without_saved_sets(module, gone)
    homes = [stage.index for stage in result.stages if stage.home]
    kept, moved = later_peaks(without_saved_sets(result, homes)), later_peaks(result)
    beside = {stage for pack in module.rank_packs() if not {*pack}.isdisjoint(changed) for stage in pack}
    return without_saved_sets(result, beside.intersection(_moved_for_nothing(kept, moved, result)))


def _rooms(module: Module) -> list[int]:
    """Return the memory of each rank's device; where it is not stated for all, all count as one size."""
    if module.cluster is None:
        return [1] * len(module.rank_packs())
    rooms = [module.cluster.device(name).memory for name in module.rank_devices()]
    return [room or 1 for room in rooms] if all(rooms) else [1] * len(rooms)


def _without_variables(module: Module, options: OffloadOptions, *, ahead: bool) -> Module:
    """Return the module with state, and weights, elsewhere, where these are asked for."""
    result = module
    if options.what != ACTIVATIONS:
        result = _without_state(result, options.space, alone=options.what in (STATE, BOTH), ahead=ahead)
    if options.what in MOVE_WEIGHTS:
        result = _without_weights(result, options.space)
    return result


def _without_weights(module: Module, space: str) -> Module:
    """Return the module with weights and gradients of packs elsewhere while the rank computes other stages."""
    assert module.schedule is not None
    packs = [pack for pack in module.rank_packs() if len(pack) >= FEWEST_STAGES]
    homes = {s: _home(module, s, space) for pack in packs for s in pack if movable_weights(module, s)}
    if not homes:
        raise UsageError(
            "weights go while a device computes other stages: it takes three stages or more",
            where="offload",
            hint="--packs puts several stages on a device",
        )
    schedule = module.schedule
    early = {rank: Program(p.start, tuple(_updates_early(module, p.batch))) for rank, p in schedule.ranks.items()}
    return with_weights(module.but(schedule=Schedule(schedule.name, schedule.microbatches, early)), homes, {})


def _without_saved_sets(
    module: Module, stages: Collection[int], space: str, *, alone: bool, moving: Numbers | None = None
) -> Module:
    """Return the module with what forwards of stages saved elsewhere until the backward, where that is a while; `alone`
    as for state, `moving` some of the microbatches."""
    result = with_saved_sets(module, {stage: _home(module, stage, space) for stage in stages}, moving)
    if alone and not any(stage.home for stage in result.stages):
        raise UsageError(
            "no stage saves what it alone takes for a microbatch that waits for its backward during 3 computations: "
            "nothing would be gained",
            where="offload",
            hint="take more microbatches or more stages, or --offload state",
        )
    return result


def _without_state(module: Module, space: str, *, alone: bool, ahead: bool) -> Module:
    """Return the module with optimiser state elsewhere between updates; an error where nothing is, and it goes
    `alone`."""
    schedule = module.schedule
    assert schedule is not None
    # What a stage hands out at once cannot be made in parts.
    handing = updating_stages(module)
    packs = [schedule.stages_of(rank) for rank in schedule.ranks if not {*schedule.stages_of(rank)} & {*handing}]
    packed = [stage for pack in packs if len(pack) > 1 for stage in pack if movable_state(module, stage)]
    chunks = {
        stage: listed for pack in packs if len(pack) == 1 for stage in pack if (listed := chunks_of(module, stage))
    }
    if not packed and not chunks and alone:
        if handing:
            raise UsageError(
                "optimiser state is on devices that update weights of others, and stays there: these hand out all new "
                "weights at once",
                where="offload",
                hint="leave out --update-on, or take --offload activations",
            )
        raise UsageError(
            "no rank has optimiser state that could be elsewhere, a stage or a chunk of it: nothing would be gained",
            where="offload",
            hint="take an optimiser that has state, and a model with more than a few parameters on each device",
        )
    result = with_homes(module, packed, space, ahead=ahead)
    for stage, listed in chunks.items():
        result = with_chunks(result, stage, listed, _home(module, stage, space))
    return result


def with_homes(module: Module, stages: Collection[int], space: str = "", *, ahead: bool = True) -> Module:
    """Return the module with the state of some stages at home in a space, and the actions that move it; `ahead` where
    there is room for the state of two at once."""
    assert module.schedule is not None
    if not stages:
        return module
    schedule, variables = module.schedule, dict(module.vars)
    for stage in stages:
        home = _home(module, stage, space)
        variables |= {name: replace(variables[name], home=home) for name in movable_state(module, stage)}
    ranks = {rank: _with_moves(module, program, stages, ahead) for rank, program in schedule.ranks.items()}
    return module.but(vars=variables, schedule=Schedule(schedule.name, schedule.microbatches, ranks))


def _home(module: Module, stage: int, space: str) -> str:
    """Name the space where what a stage lets go of is at home."""
    names = {_space_of(module, name, space) for name in module.devices_of(stage)}
    if len(names) > 1:
        kinds = {module.cluster.device(name).kind for name in module.devices_of(stage) if module.cluster is not None}
        hint = "name one of them" if len(kinds) == 1 else "no space is for processors and GPUs"
        raise UsageError(f"devices of stage {stage} reach different spaces", where="offload", hint=hint)
    return names.pop()


def _space_of(module: Module, device: str, space: str) -> str:
    """Name the space of a device: the given one, or the first that it reaches. One for another kind of device that
    stages run on is none for this one."""
    cluster = module.cluster
    assert cluster is not None
    reached, kind = [one.name for one in cluster.spaces_of(device)], cluster.device(device).kind
    others = [name for name in module.rank_devices() if cluster.device(name).kind != kind]
    if space in reached:
        return space
    if space and not any(space == one.name for name in others for one in cluster.spaces_of(name)):
        return cluster.space(space, device).name
    if not reached:
        needed = next(name for name, user in SPACE_KINDS.items() if user == kind)
        raise UsageError(
            f"{device} reaches no memory space",
            where="offload",
            hint=f"add a [[space]] of kind {needed} to the cluster",
        )
    return reached[0]


def _with_moves(module: Module, program: Program, stages: Collection[int], ahead: bool) -> Program:
    """Insert CI, CO and L around the updates of some stages."""
    assert module.schedule is not None
    packed = len({action.stage for action in program.batch}) > 1
    batch = _updates_early(module, program.batch) if packed else program.batch
    updates = [i for i, a in enumerate(batch) if a.kind == UPDATE and a.stage in stages]
    if not updates:
        return program
    before: dict[int, list[Action]] = {}
    for at, (first, last) in enumerate(zip([-1, *updates], updates, strict=False)):
        update, earlier = batch[last], batch[updates[at - 1]]
        # The last update of a list comes before the first of the next one.
        number, place = (earlier.mb if at else earlier.mb - 1), middle_of(batch, first, last)
        goes, comes = place, place
        if ahead and at and len(updates) > 2 and sum(action.kind in COMPUTE for action in batch[first + 1 : last]) == 1:
            goes, comes = last + 1, first + 1
        if number >= 0:
            before.setdefault(goes, []).append(_moved(LET_GO, earlier, number))
        else:  # that would be the list after the next, which no run comes to
            before.setdefault(middle_of(batch, updates[-1], len(batch)), []).append(_moved(LET_GO, earlier, earlier.mb))
        before.setdefault(comes, []).append(_moved(COPY_IN, update, update.mb))
    listed: list[Action] = []
    for i in range(len(batch) + 1):
        listed += before.get(i, ())
        listed += batch[i : i + 1]
        if i in updates:
            listed.append(_moved(COPY_OUT, batch[i], batch[i].mb))
    return Program(program.start, tuple(listed))


def _moved(kind: str, update: Action, number: int) -> Action:
    return Action(kind, update.stage, number, item=STATE_ITEM)


def _updates_early(module: Module, actions: Sequence[Action]) -> Sequence[Action]:
    """Move each update that takes nothing from other stages right behind the last gradient of its stage, or the sum of
    it over replicas."""
    assert module.schedule is not None
    per_batch = module.schedule.microbatches
    last = {a.stage: i for i, a in enumerate(actions) if a.kind in (*ADDERS, SUM)}
    early = {
        a.stage: a
        for a in actions
        if a.kind == UPDATE
        and (graph := module.stage_graph(a.stage, UPDATE)) is not None
        and not graph.ins
        and a.stage in last
        and actions[last[a.stage]].batch(per_batch) == a.mb
    }
    behind = {_behind_sends(actions, last[stage]): update for stage, update in early.items()}
    listed: list[Action] = []
    for i, action in enumerate(actions):
        if action not in early.values():
            listed.append(action)
        if i in behind:
            listed.append(behind[i])
    return listed


def _behind_sends(actions: Sequence[Action], at: int) -> int:
    """Return the place of the last send that follows an action at once, so that nothing waits for the update."""
    while at + 1 < len(actions) and actions[at + 1].kind in SENDS:
        at += 1
    return at
