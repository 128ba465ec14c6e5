"""Keep the weights of as many stages on a device as its memory has room for.

In: a module whose weights move, with those of two stages on a device at once. Out: the same, where devices that are too
small for all weights have room for those of as many stages as fit. Weights that never go then have no other home. Where
all would fit, or no memory is stated, all go, as asked. A note says of devices with stated memory that all would fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import GRADIENTS_ITEM, WEIGHTS_ITEM
from penstock.ir.graph import GRAD, PARAM, Module
from penstock.ir.memory.items import stage_images
from penstock.ir.schedule import Program, Schedule
from penstock.passes.memory.overlap_that_fits import too_small

from .elsewhere import runs_batch_by_batch, with_weights
from .stays import FEWEST


@dataclass(frozen=True, slots=True)
class _Pack:
    """The ranks that run the same stages, and their devices."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    devices: frozenset[str]


def with_weights_that_stay(module: Module) -> Module:
    """Return the module with weights of as many stages on each device as there is room for."""
    schedule = module.schedule
    assert schedule is not None
    if not runs_batch_by_batch(schedule) or too_small(module):
        return module
    homes = {
        stage.index: images[WEIGHTS_ITEM].space
        for stage in module.stages
        if WEIGHTS_ITEM in (images := stage_images(module, stage.index))
    }
    plain = _with_all_weights(module)
    small = too_small(plain)
    module = _noted(module, homes, small)
    packs = [pack for pack in _packs(module, homes) if pack.devices & small]
    fits, short = dict.fromkeys(packs, FEWEST), {pack: len(pack.stages) for pack in packs}
    while any(short[pack] - fits[pack] > 1 for pack in packs):
        tried = {pack: (fits[pack] + short[pack]) // 2 for pack in packs}
        small = too_small(_with_rooms(plain, homes, tried))
        for pack, room in tried.items():
            if short[pack] - fits[pack] > 1:
                (short if pack.devices & small else fits)[pack] = room
    if all(room == FEWEST for room in fits.values()):
        return module
    result = _with_rooms(plain.but(notes=module.notes), homes, fits)
    return module if too_small(result) else result


def _noted(module: Module, homes: Mapping[int, str], small: Collection[str]) -> Module:
    """Return the module with a note of the devices whose weights move although all would fit."""
    cluster, devices = module.cluster, module.rank_devices()
    assert cluster is not None
    moving = {devices[rank] for rank, stages in enumerate(module.rank_packs()) if homes.keys() & {*stages}}
    large = sorted(name for name in moving if cluster.device(name).memory and name not in small)
    if not large:
        return module
    return module.noted(
        "weights",
        f"{', '.join(large)} {'has' if len(large) == 1 else 'have'} memory for all weights: these need not move",
    )


def _with_rooms(module: Module, homes: Mapping[int, str], rooms: Mapping[_Pack, int]) -> Module:
    return with_weights(module, homes, {rank: room for pack, room in rooms.items() for rank in pack.ranks})


def _packs(module: Module, homes: Mapping[int, str]) -> Sequence[_Pack]:
    """List the packs whose weights move, of ranks that run the same."""
    devices, ranks = module.rank_devices(), dict[tuple[int, ...], list[int]]()
    for rank, stages in enumerate(module.rank_packs()):
        ranks.setdefault(tuple(stage for stage in stages if stage in homes), []).append(rank)
    return [
        _Pack(stages, tuple(members), frozenset(devices[rank] for rank in members))
        for stages, members in ranks.items()
        if len(stages) > FEWEST
    ]


def _with_all_weights(module: Module) -> Module:
    """Return the module without the moves of weights and gradients."""
    schedule, items = module.schedule, (WEIGHTS_ITEM, GRADIENTS_ITEM)
    assert schedule is not None
    variables = {name: replace(var, home="") if var.role in (PARAM, GRAD) else var for name, var in module.vars.items()}
    ranks = {
        rank: Program(p.start, tuple(action for action in p.batch if action.item not in items))
        for rank, p in schedule.ranks.items()
    }
    return module.but(vars=variables, schedule=Schedule(schedule.name, schedule.microbatches, ranks))
