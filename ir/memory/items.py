"""The items of stages that have a home in another memory space: what they are, how they lie there, and when they are on
the device.

In: a module. An item is named by a letter (ir/action_kinds.py): `o` are the variables of a stage's optimiser state that
have a home. It lies at home as it lies on the device, one variable behind the other: its *image*. CI takes memory on
the device for the whole image, L with the item gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import COPY_IN, LET_GO
from penstock.ir.graph import Module, Var, stage_vars, touched_vars
from penstock.ir.schedule import COMPUTE, Action

# Every variable of an image starts at a multiple of so many bytes, for vector loads.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of an item: its variables with the types that a rank has of them, and where each begins."""

    space: str
    variables: Mapping[str, Var]
    places: Mapping[str, int]
    nbytes: int


def image_of(variables: Mapping[str, Var]) -> Image | None:
    """Lay out the variables that have a home, one behind the other; None where there are none."""
    at_home = {name: var for name, var in variables.items() if var.home}
    if not at_home:
        return None
    places, total = {}, 0
    for name, var in at_home.items():
        places[name] = total
        total += -(-var.type.nbytes // ALIGNMENT) * ALIGNMENT
    return Image(next(iter(at_home.values())).home, at_home, places, total)


def stage_image(module: Module, stage: int) -> Image | None:
    """Return the image of a stage's item on one of its ranks; None where it has none."""
    if not any(var.home for var in module.vars.values()):
        return None
    variables = stage_vars(module, stage).items()
    return image_of({name: replace(var, type=module.local_type(var.type, stage)) for name, var in variables})


def users_of(module: Module, stage: int, image: Image) -> frozenset[str]:
    """Return the computations of a stage that touch an item, by kind."""
    kinds = ("read", "write", "accum", "take", "put")
    return frozenset(
        kind
        for kind in COMPUTE
        if not image.variables.keys().isdisjoint(touched_vars(module.stage_graph(stage, kind), *kinds))
    )


def is_brought(action: Action) -> bool:
    """Return whether an action takes memory for an item."""
    return action.kind == COPY_IN


def is_let_go(action: Action) -> bool:
    """Return whether an action gives the memory of an item back."""
    return action.kind == LET_GO and bool(action.item)


def resident_bytes(module: Module, actions: Iterable[Action]) -> Iterator[int]:
    """Yield after each action of a rank the bytes of items that are on the device."""
    sizes: dict[int, int] = {}
    now = 0
    for action in actions:
        if is_brought(action) or is_let_go(action):
            if action.stage not in sizes:
                image = stage_image(module, action.stage)
                sizes[action.stage] = 0 if image is None else image.nbytes
            now += sizes[action.stage] * (1 if is_brought(action) else -1)
        yield now


def home_bytes(module: Module) -> dict[tuple[str, str], dict[int, int]]:
    """Return the bytes that ranks have at home in each space, by its name and host, and by rank."""
    held: dict[tuple[str, str], dict[int, int]] = {}
    devices = module.rank_devices()
    images = {stage.index: stage_image(module, stage.index) for stage in module.stages}
    for rank, stages in enumerate(module.rank_packs()):
        for image in (image for stage in stages if (image := images[stage]) is not None):
            host = "" if module.cluster is None else module.cluster.device(devices[rank]).host
            of_ranks = held.setdefault((image.space, host), {})
            of_ranks[rank] = of_ranks.get(rank, 0) + image.nbytes
    return held
