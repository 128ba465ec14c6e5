"""The variables of a rank, with their values: from the bundle, or from a checkpoint.

In: a bundle, a rank, the elements of its settings, the directory of a checkpoint. Out: a Store that is filled. Of a
variable that is split over the devices of its stage, the rank has the local type, and reads its own slices alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from penstock.backends.bundle.format import Bundle
from penstock.backends.registry import backend_of
from penstock.ir.graph import COPY, GRAD, Var, stage_vars, stepped_vars
from penstock.ir.memory.items import Image
from penstock.ir.memory.predict import BATCHES
from penstock.ir.memory.saved_sets import most_sets_at_home, saved_set
from penstock.ir.sharding.tiles import TensorTile, copy, seat_of, tile_of, whole_tile
from penstock.runtime.checkpoint.format import read_index
from penstock.runtime.checkpoint.resuming import Filling, StageFiles, fill_copies, fill_tiles, load_state
from penstock.runtime.state.homes import HomedItem, Lanes
from penstock.runtime.state.lanes import ThreadLanes
from penstock.runtime.state.saved_sets import SavedSets
from penstock.runtime.state.settings import Settings
from penstock.runtime.state.store import NO_SUMS, Store, SummedGradients


def check_device(bundle: Bundle, rank: int) -> None:
    """Raise a UsageError where this host lacks the device of a rank: before ranks meet, and wait for one that ended."""
    entry = bundle.rank(rank)
    for stage in entry.stages:
        backend_of(bundle.manifest.backend).check_host(bundle.module, stage, entry.device)


@dataclass(frozen=True, slots=True)
class StateSource:
    """The place of a stage's state: its bundle and rank, the elements of its settings, perhaps a checkpoint. `lanes`
    copy what has a home elsewhere."""

    bundle: Bundle
    rank: int
    stage: int
    tables: Settings
    place: Path | None = None
    lanes: Lanes = field(default_factory=ThreadLanes)

    def homed(self, image: Image) -> HomedItem:
        """Make the home of an item, in its space as the device of the rank reaches it."""
        cluster = self.bundle.module.cluster
        assert cluster is not None, "spaces are those of a cluster"
        space = cluster.space(image.space, self.bundle.rank(self.rank).device)
        return HomedItem(image, self.lanes.open(space, image.nbytes) if image.stored else None, self.lanes)


def load_saved_sets(bundle: Bundle, rank: int, stage: int, lanes: Lanes) -> SavedSets | None:
    """Open the homes of what forwards of a stage save, as many as the rank has sets away at once; None without any."""
    module = bundle.module
    saved = saved_set(module, stage)
    if saved is None or module.cluster is None or module.schedule is None:
        return None
    space = module.cluster.space(saved.space, bundle.rank(rank).device)
    count = most_sets_at_home(module.schedule.expand(rank, BATCHES), stage, saved.users)
    return SavedSets(saved, [lanes.open(space, saved.nbytes) for _ in range(count)], lanes)


def load_store(
    source: StateSource,
    device: torch.device,
    *,
    grow: bool = False,
    summed: SummedGradients = NO_SUMS,
    late: Collection[str] = (),
) -> Store:
    """Return the state of a stage at a checkpoint, or at the beginning. `grow` and `summed` are those of a Store. What
    is `late` has no elements before it is asked for (`Store.fill_late`)."""
    store = _load(source, device, grow, summed, late=late)
    store.reread = lambda name: _load(source, device, only=(name,)).newest(name)
    return store


def _load(
    source: StateSource,
    device: torch.device,
    grow: bool = False,
    summed: SummedGradients = NO_SUMS,
    only: Collection[str] | None = None,
    late: Collection[str] = (),
) -> Store:
    """Return the state of a stage, or that of some of its variables alone."""
    bundle, rank, stage, place = source.bundle, source.rank, source.stage, source.place
    module = bundle.module
    variables = {name: var for name, var in stage_vars(module, stage).items() if only is None or name in only}
    mesh, seat = seat_of(module, rank)
    tiles = {name: tile_of(var.type, mesh, seat) for name, var in variables.items()}
    local = {name: replace(var, type=var.type.local(mesh.sizes)) for name, var in variables.items()}
    step = 0 if place is None else read_index(place).step
    store = Store(
        local, stepped_vars(module), version=step, grow=grow, device=device, summed=summed, homed=source.homed
    )
    at_home = {name for item in store.every_item() for name in item.image.variables}
    files = None if place is None else StageFiles(place, store, tiles)
    store.late = set(late) - at_home
    store.fill = lambda store, name: _fill(source, store, {name: variables[name]}, tiles, files)
    here = {name: var for name, var in variables.items() if name not in at_home | store.late}
    _fill(source, store, here, tiles, files)
    # One item at a time is on the device.
    for name, (item, *_) in store.items.items():
        with store.filling(name, older=files is not None):
            _fill(source, store, {name: variables[name] for name in item.image.variables}, tiles, files)
    return store


def _fill(
    source: StateSource,
    store: Store,
    variables: Mapping[str, Var],
    tiles: Mapping[str, TensorTile],
    files: StageFiles | None,
) -> None:
    """Fill some variables of a store: from the bundle, or from the files of a checkpoint."""
    for name, var in variables.items():
        if var.role == GRAD:
            continue
        if tiles[name].is_padded:
            store.clear(name)
        elif var.init == "zeros":
            store.newest(name).zero_()
    _fill_tables(variables, source.tables, store, tiles)
    if files is None:
        fill_tiles(
            source.bundle.weights_file(source.stage),
            {
                name: Filling(store.newest(name), tiles[name], whole_tile(var.type))
                for name, var in variables.items()
                if var.init == "file" and var.role != COPY
            },
        )
        fill_copies(store, variables)
    else:
        load_state(files, store, variables)


def _fill_tables(variables: Mapping[str, Var], tables: Settings, store: Store, tiles: Mapping[str, TensorTile]) -> None:
    for name, var in variables.items():
        if isinstance(var.init, tuple):
            tensor = store.newest(name)
            whole = torch.tensor(tables.get(name, var.init), dtype=tensor.dtype).reshape(var.type.dims)
            copy(whole, whole_tile(var.type), tensor, tiles[name])
