"""The items of stages that have a home in another memory space: what they are, how they lie there, and when they are on
the device.

In: a module. An item is named by a letter, perhaps with a number (ir/action_kinds.py). `o` are the variables of a
stage's optimiser state that have a home, `c0` those of chunk 0 of it, `w` its parameters and `g` its gradients. It
lies at home as it lies on the device, one variable behind the other: its *image*. CI takes memory on the device for the
whole image, L with the item gives it back.

What is there already is *claimed* once more by a CI, and nothing is copied; each L ends a claim, and the last one gives
the memory back. Weights of which there are two versions have an image for each, and their moves name one: `2CI2@1:w`. A
version that the update of the same batch makes has no copy at home yet: its CI takes memory alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import COPY_IN, GRADIENTS_ITEM, LET_GO, STATE_ITEM, UPDATE, WEIGHTS_ITEM
from penstock.ir.graph import GRAD, PARAM, Module, Var, stage_vars, touched_vars
from penstock.ir.memo import Derived
from penstock.ir.schedule import COMPUTE, COPIES, Action

from .saved_sets import most_sets_at_home, saved_set
from .update_parts import chunk_item, update_parts

# Every variable of an image starts at a multiple of so many bytes, for vector loads.
ALIGNMENT = 64
_ITEM_OF = {PARAM: WEIGHTS_ITEM, GRAD: GRADIENTS_ITEM}
# The batches after which a rank has no more at home than before.
_BATCHES = 3


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of an item: its variables with the types that a rank has of them, and where each begins. Gradients are
    zero whenever they come: those at home take no bytes there, and none are copied."""

    space: str
    variables: Mapping[str, Var]
    places: Mapping[str, int]
    nbytes: int

    @property
    def is_zero(self) -> bool:
        return all(var.role == GRAD for var in self.variables.values())

    @property
    def holds_weights(self) -> bool:
        """Return whether these are weights, which may be claimed several times. Others are brought once for a use."""
        return all(var.role == PARAM for var in self.variables.values())

    @property
    def stored(self) -> int:
        """The bytes at home of a version, which a copy moves."""
        return 0 if self.is_zero else self.nbytes

    @property
    def versions(self) -> int:
        """The number of versions that there are at home."""
        return max(var.versions for var in self.variables.values())


def item_of(var: Var) -> str:
    """Name the item of a variable that has a home."""
    if var.role in _ITEM_OF:
        return _ITEM_OF[var.role]
    return STATE_ITEM if var.chunk is None else chunk_item(var.chunk)


def images_of(variables: Mapping[str, Var]) -> dict[str, Image]:
    """Lay out the variables of each item that have a home, one behind the other."""
    at_home: dict[str, dict[str, Var]] = {}
    for name, var in variables.items():
        if var.home:
            at_home.setdefault(item_of(var), {})[name] = var
    return {item: _image(at_home[item]) for item in sorted(at_home, key=lambda item: (len(item), item))}


def _image(variables: Mapping[str, Var]) -> Image:
    places, total = {}, 0
    for name, var in variables.items():
        places[name] = total
        total += -(-var.type.nbytes // ALIGNMENT) * ALIGNMENT
    return Image(next(iter(variables.values())).home, variables, places, total)


_IMAGES = Derived[dict[int, dict[str, Image]]](__name__, "images")


def stage_images(module: Module, stage: int) -> Mapping[str, Image]:
    """Return the image of each item of a stage on one of its ranks."""
    if not any(var.home for var in module.vars.values()):
        return {}
    images = module.kept.once(_IMAGES, dict)
    if stage not in images:
        variables = stage_vars(module, stage).items()
        images[stage] = images_of(
            {name: replace(var, type=module.local_type(var.type, stage)) for name, var in variables}
        )
    return images[stage]


def users_of(module: Module, stage: int, image: Image) -> frozenset[str]:
    """Return the computations of a stage that touch an item: a kind, or a part of the update (`U.c0`)."""
    return _touching(module, stage, image, "read", "write", "accum", "take", "put")


def changers_of(module: Module, stage: int, image: Image) -> frozenset[str]:
    """Return the computations of a stage after which an item has to be copied to its home before it is let go of. Those
    that take gradients leave zeros."""
    return _touching(module, stage, image, *(("accum",) if image.is_zero else ("write", "accum", "take", "put")))


def _touching(module: Module, stage: int, image: Image, *kinds: str) -> frozenset[str]:
    graphs = {kind: module.stage_graph(stage, kind) for kind in COMPUTE if kind != UPDATE}
    parts = {
        Action(UPDATE, stage, 0, item=item).computation: part for item, part in update_parts(module, stage).items()
    }
    return frozenset(
        computation
        for computation, graph in {**graphs, **parts}.items()
        if not image.variables.keys().isdisjoint(touched_vars(graph, *kinds))
    )


def is_brought(action: Action) -> bool:
    """Return whether an action takes memory for an item."""
    return action.kind == COPY_IN


def is_let_go(action: Action) -> bool:
    """Return whether an action gives the memory of an item back."""
    return action.kind == LET_GO and bool(action.item)


class ItemClaims:
    """The items of a rank that are on the device, as its actions come and go."""

    def __init__(self) -> None:
        self._held = Counter[tuple[int, str, int | None]]()

    def count(self, action: Action) -> int:
        """Return how often the item of CI or L is claimed."""
        return self._held[action.stage, action.item, action.version]

    def change(self, action: Action) -> int:
        """Follow CI or L of an item, and return by how many images more there is on the device: 1, 0 or -1."""
        key = action.stage, action.item, action.version
        before = self._held[key]
        self._held[key] = after = max(0, before + (1 if is_brought(action) else -1))
        return (after > 0) - (before > 0)


def version_read(action: Action) -> int | None:
    """Return the version of an item that an action moves or reads: an update reads that before the one it makes."""
    if action.version is None:
        return None
    return action.version - 1 if action.kind == UPDATE else action.version


def is_made_later(action: Action) -> bool:
    """Return whether CI is for a version that the update of its batch makes: it takes memory, and copies nothing."""
    return is_brought(action) and action.version is not None and action.version > action.mb


def resident_bytes(module: Module, actions: Iterable[Action], space: str = "") -> Iterator[int]:
    """Yield after each action of a rank the bytes of items that are on the device: of those with a home in a space, or
    of all."""
    now, claims = 0, ItemClaims()
    for action in actions:
        if is_brought(action) or is_let_go(action):  # saved sets are values, and in walk.py
            image = stage_images(module, action.stage).get(action.item)
            if image is not None and space in ("", image.space):
                now += image.nbytes * claims.change(action)
        yield now


def copied_bytes(module: Module, rank: int, space: str = "") -> dict[str, int]:
    """Return the bytes of variables that a rank copies for a batch, by kind: CI and CO. They are those with a home in a
    space, or all."""
    copied, claims = dict.fromkeys(COPIES, 0), ItemClaims()
    assert module.schedule is not None
    for action in module.schedule.expand(rank, 2 * _BATCHES):
        image = stage_images(module, action.stage).get(action.item) if action.item else None
        if image is None or space not in ("", image.space):
            continue
        there = (is_brought(action) or is_let_go(action)) and claims.change(action) != 1
        if (
            action.kind in COPIES
            and action.mb == _BATCHES
            and not is_made_later(action)
            and not (is_brought(action) and there)
        ):
            copied[action.kind] += image.stored
    return copied


def home_bytes(module: Module) -> dict[tuple[str, str], dict[int, int]]:
    """Return the bytes that ranks have at home in each space, by its name and host, and by rank: items of variables,
    and as many saved sets as are away at once."""
    held: dict[tuple[str, str], dict[int, int]] = {}
    devices = module.rank_devices()
    for rank, stages in enumerate(module.rank_packs()):
        images = [image for stage in stages for image in stage_images(module, stage).values()]
        for space, nbytes in (
            *((image.space, image.stored * image.versions) for image in images),
            *_saved(module, rank, stages),
        ):
            host = "" if module.cluster is None else module.cluster.device(devices[rank]).host
            of_ranks = held.setdefault((space, host), {})
            of_ranks[rank] = of_ranks.get(rank, 0) + nbytes
    return held


def _saved(module: Module, rank: int, stages: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Yield the space and the bytes of the saved sets that a rank has at home at once."""
    for stage in stages:
        if (saved := saved_set(module, stage)) is not None and module.schedule is not None:
            actions = module.schedule.expand(rank, _BATCHES)
            yield saved.space, saved.nbytes * most_sets_at_home(actions, stage, saved.users)
