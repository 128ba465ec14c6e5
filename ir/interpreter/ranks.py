"""The ranks of an interpreted schedule, with what each has of variables and values; variables of stages after a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.action_kinds import COPY_IN, COPY_OUT
from penstock.ir.graph import COORDINATE, Edge, Mesh, Module, Value
from penstock.ir.memory.saved_sets import SavedSet
from penstock.ir.schedule import Action
from penstock.ir.sharding.between_meshes import arriving_values
from penstock.ir.sharding.tile_messages import TileSlice
from penstock.ir.sharding.tiles import TensorTile, cut, fill, owners, tile_of
from penstock.ir.types import TensorType
from penstock.support.errors import VerifyError

from .ops import Array, array_dtype
from .store import Arrays, VersionStore


class InterpretedRank:
    """One rank: its program, its variables, and the values it holds for each of its stages and each microbatch and
    batch, by `Action.holder`."""

    def __init__(self, index: int, program: list[Action], mesh: Mesh, place: int, is_local: bool) -> None:
        self.index, self.program, self.is_local = index, program, is_local
        # The variables of each stage: stages may have copies of their own under one name, such as counters.
        self.stores: dict[int, VersionStore] = {}
        self.mesh, self.place = mesh, place
        self.coordinates = {f"{COORDINATE}{axis}": np.array(at) for axis, at in mesh.coordinates(place).items()}
        self.step = 0
        self.values: dict[tuple[int, int], dict[str, Array]] = {}
        # The saved sets that are at home, by stage and microbatch.
        self.homes: dict[tuple[int, int], dict[str, Array]] = {}
        # Stages and batches whose gradients it has added to a sum that it has not used yet.
        self.waiting: set[tuple[int, int]] = set()

    def action(self) -> Action | None:
        return self.program[self.step] if self.step < len(self.program) else None

    def move_saved(self, action: Action, saved: SavedSet | None) -> None:
        """Move the saved set of a microbatch between its home and the device, at once, or let go of it there."""
        if saved is None:
            raise VerifyError(f"stage {action.stage} has no {action.item} with a home")
        held = self.values.setdefault((action.stage, action.mb), {})
        missing = [name for name in saved.values if name not in held]
        if action.kind == COPY_IN:
            held |= self.homes.pop((action.stage, action.mb), {})
        elif missing:
            raise VerifyError(f"microbatch {action.mb} does not hold %{missing[0]}, which is moved")
        elif action.kind == COPY_OUT:
            self.homes[action.stage, action.mb] = {name: held[name] for name in saved.values}
        else:
            for name in saved.values:
                del held[name]

    def part(self, whole: Array, type: TensorType) -> Array:
        """Return this rank's part of a tensor: all of it before `localize`."""
        part: Array = cut(whole, type, self.mesh, self.place) if self.is_local else whole
        return part

    def tile(self, type: TensorType) -> TensorTile | None:
        """Return which part of a tensor this rank has; None where it is all of it."""
        return tile_of(type, self.mesh, self.place) if self.is_local and not type.is_plain else None


class StageVariables:
    """The variables of a stage after a run, whole: those of its ranks, joined."""

    def __init__(self, module: Module, stage: int, ranks: Sequence[InterpretedRank]) -> None:
        self.module, self.ranks, self.stores = module, ranks, [rank.stores[stage] for rank in ranks]
        self.slots, self.newest = self.stores[0].slots, self.stores[0].newest

    def latest(self, name: str) -> Array:
        return self._whole(name, [store.latest(name) for store in self.stores])

    def before_latest(self, name: str) -> Array | None:
        parts = [part for store in self.stores if (part := store.before_latest(name)) is not None]
        return self._whole(name, parts) if len(parts) == len(self.ranks) else None

    def _whole(self, name: str, parts: Sequence[Array]) -> Array:
        type, mesh = self.module.vars[name].type, self.ranks[0].mesh
        if self.ranks[0].tile(type) is None:
            return parts[0]
        whole = np.empty(type.dims, parts[0].dtype)
        for place in owners(type, mesh).values():
            fill(whole, parts[place], type, mesh, place)
        return whole


def part_across(
    module: Module, edge: Edge, name: str, mb: int, rank: InterpretedRank, teams: Sequence[Sequence[InterpretedRank]]
) -> Array | None:
    """Return a rank's part of a value of a stage with another mesh, from the parts that a team there holds; None where
    no team has all of them."""
    mesh, left = module.mesh_of(edge.src), next(v.type for v in edge.values if v.name == name)
    arrived = next(v.type for v in arriving_values(edge) if v.name == name)
    for team in teams:
        parts = {other.place: x for other in team if (x := other.values.get((edge.src, mb), {}).get(name)) is not None}
        if len(parts) == len(team):
            whole = np.zeros(left.dims, next(iter(parts.values())).dtype)
            for place, part in parts.items():
                fill(whole, part, left, mesh, place)
            part_here: Array = cut(whole, arrived, rank.mesh, rank.place)
            return part_here
    return None


def put_tiles(
    held: dict[str, Array], message: Arrays, pieces: Sequence[TileSlice], arriving: Sequence[Value], precision: str
) -> None:
    """Put the tiles of a message where they lie in the parts that a rank has of the values of an edge."""
    for value in arriving:
        if value.name not in held:
            held[value.name] = np.zeros(value.type.dims, array_dtype(value.type.dtype, precision))
    for piece in pieces:
        held[piece.whole][piece.put] = message[piece.value.name]
