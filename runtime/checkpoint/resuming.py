"""Going on from a checkpoint, under the plan it was made with or any other of the same model.

`start_from` decides, for all ranks the same, where a run starts; `load_state` fills the variables of one rank. Tensors
are found by name, so stages, devices and replicas may be others. These may differ, too, with these results:

    schedule      A bundle that needs an older version of the weights (2bw) and a checkpoint that has none: the newest
                  stands for it, too, as at the very beginning of a training. So step t after 1f1b computes
                  W(t+1) = W(t) - upd(grad f(W(t))), step t+1 the same from f(W(t)) again, and the delay is there from
                  then on. A checkpoint of 2bw on a bundle without delay: the newest counts, the older one is left out,
                  no gradient is under way (the pipeline was drained), and step t is W(t+1) = W(t) - upd(grad f(W(t))).
    microbatches  Their number and size. The step goes on, and the data goes on with the first sample that was not read:
                  sample n of the whole training is what microbatch k begins with, n = k · b + offset. Microbatches of
                  size b are numbered n // b for what is drawn and made up for them, so that equal sizes give equal
                  masks and noise whatever their number per batch.
    seed          of random draws in the model: the checkpoint's counts. It is xored into the upper word of a
                  microbatch's number (ir/ops/draws.py), so numbers are handed to the module with the difference of both
                  seeds in it.
    loss scale    of f16: begins anew where the checkpoint has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from penstock.backends.bundle.format import Bundle
from penstock.ir.batch_shares import microbatch_size
from penstock.ir.graph import COPY, PARAM, Module, Var, stage_vars, stepped_vars
from penstock.ir.sharding.tiles import SharedSlices, TensorTile, overlaps
from penstock.ir.training.rates import Rate
from penstock.runtime.messages.control import DataSpec
from penstock.runtime.messages.defaults import WRAP
from penstock.runtime.state.settings import settings_for_run
from penstock.support.errors import VerifyError
from penstock.support.words import counted, itemised

from .finding import Chosen
from .format import Index, another_model, check_file, is_kept, random_seed, read_index
from .stored_tiles import files_for

if TYPE_CHECKING:
    import torch

    from penstock.runtime.state.store import Store

# State that belongs to no parameter; what f16 alone has may be missing.
_SCALE = ("loss.scale", "loss.scale.good")
_COUNTERS = ("step", "updates", *_SCALE)
# Problems that an error lists.
_SHOWN = 8
# Bytes of a file that are mapped at once.
_MAPPED = 8 << 20


@dataclass(frozen=True)
class Start:
    """The start of a run: at a checkpoint or at the beginning. `offset` is in samples, `key` the difference of the
    seeds, `warnings` are for users."""

    place: Path | None
    step: int
    offset: int
    key: int
    tables: dict[str, tuple[float, ...]]
    warnings: list[str]


def start_from(
    bundle: Bundle, data: DataSpec | None, chosen: Chosen | None, lr: float | None, rate: Rate | str | None
) -> Start:
    """Return the start of a run of a bundle. VerifyError for a checkpoint that does not fit it."""
    module = bundle.module
    if chosen is None:
        tables, changes = settings_for_run(module, None, lr, rate)
        return Start(None, 0, 0, 0, tables, changes)
    place = chosen.place
    index = read_index(place)
    warnings = chosen.words + check_resume(index, module, data, str(place), bundle.manifest.source_hash)
    tables, changes = settings_for_run(module, index.tables, lr, rate)
    assert module.schedule is not None
    batch = module.schedule.microbatches * microbatch_size(module)
    offset = 0 if index.samples is None else index.samples - index.step * batch
    seed = random_seed(module)
    key = 0 if seed is None or index.seed is None else seed ^ index.seed
    return Start(place, index.step, offset, key, tables, warnings + changes)


# ------------------------------------------------------------------------------------------------ does it fit


def check_resume(index: Index, module: Module, data: DataSpec | None, where: str, source_hash: str = "") -> list[str]:
    """Refuse a checkpoint that does not fit; return the differences that may be meant. `source_hash` is that of the
    bundle's model, if it has one. Variables that do not fit a model of another hash are those of another model, and
    none of them says more."""
    problems: list[str] = []
    unlike: list[str] = []
    if index.module != module.name:
        problems.append(f"it is of model {index.module}, the bundle is of {module.name}")
    types = index.types()
    used = {name: var for stage in module.stages for name, var in stage_vars(module, stage.index).items()}
    for name, var in used.items():
        missing = name not in types and name in _SCALE
        if is_kept(var) and types.get(name) != str(var.type.plain) and not missing:
            unlike.append(f"{name}: the bundle has {var.type.plain}, the checkpoint {types.get(name, 'nothing')}")
    # State of the optimiser is named after its parameter, and goes with it.
    lost = [
        name for name in types.keys() - used.keys() if name.rpartition(".")[0] not in types and name not in _COUNTERS
    ]
    unlike += [f"{name}: the bundle has no such variable" for name in lost]
    other = another_model(index, module, source_hash, where) if source_hash else None
    # An optimiser of another kind, or a parameter that is frozen here, are no other model, although its file may have
    # been written anew.
    parameters = {name for name, var in used.items() if var.role == PARAM}
    if other is not None and any(types.get(name) != str(used[name].type.plain) for name in parameters):
        raise other
    if index.format == 1 and module.schedule is not None and index.microbatches != module.schedule.microbatches:
        problems.append(
            f"it is of {index.microbatches} microbatches per batch, the bundle has {module.schedule.microbatches}, "
            "and checkpoints of "
            "format 1 do not say how many samples were read"
        )
    if problems or unlike:
        shown = [*problems, *sorted(unlike)[:_SHOWN]]
        shown += [f"and {counted(len(unlike) - _SHOWN, 'more such variable')}"] if len(unlike) > _SHOWN else []
        hint = "a small one that is frozen by --frozen is a constant, use a group to freeze it" if lost else ""
        raise VerifyError("the checkpoint does not fit the bundle:" + itemised(shown), where=where, hint=hint)
    differences = _differences(index, module, data)
    return (
        differences
        if other is None
        else [f"{other.what}; its variables fit, and training goes on with them", *differences]
    )


def _differences(index: Index, module: Module, data: DataSpec | None) -> list[str]:
    assert module.schedule is not None
    differences = []
    had = any(file.version != index.step for file in index.files.values())
    needs = any(module.vars[name].versions > 1 for name in stepped_vars(module))
    change = f"the checkpoint is of schedule {index.schedule}, the bundle has {module.schedule.name}"
    if had and not needs:
        differences.append(
            f"{change}: training goes on from its newest weights, gradients are no longer an update late"
        )
    elif needs and not had and index.step:
        differences.append(
            f"{change}: it has no older weights, so the first two batches see its newest, and gradients are an update "
            "late from "
            "then on: a rate that suited before may be too high now (--lr)"
        )
    batch = microbatch_size(module) * module.schedule.microbatches
    if index.step and index.samples is not None and index.microbatches != module.schedule.microbatches:
        differences.append(
            f"the checkpoint is of {index.microbatches} microbatches per batch, the bundle has "
            f"{module.schedule.microbatches}: "
            f"batches of {batch} samples go on from sample {index.samples}"
        )
    if data is not None and data.last != WRAP and (index.samples or 0) % batch:
        differences.append(
            f"an epoch with its last batch {data.last} is a number of whole batches, which are of {batch} samples "
            "now: of this epoch some "
            "samples may be read twice or not at all"
        )
    seed = random_seed(module)
    if seed is not None and index.seed is not None and seed != index.seed:
        differences.append(f"random draws go on with seed {index.seed} of the checkpoint, not with {seed} as compiled")
    if data is not None and index.data is not None and data != index.data:
        differences.append(f"the data is now {_describe(data)}, the checkpoint was trained on {_describe(index.data)}")
    return differences


def _describe(data: DataSpec) -> str:
    last = "" if data.last == WRAP else f", last batch {data.last}"
    return f"{data.source}{' shuffled' if data.shuffle else ''} with seed {data.seed}{last}"


# ------------------------------------------------------------------------------------------------ loading


class StageFiles:
    """The files of a checkpoint that fits, as a rank fills the variables of a stage from them. `tiles` are the rank's
    own: of a tensor that is split it reads nothing else.

    Each file is checked once, also where variables come in several calls. A rank that takes all tensors of a file, and
    each as it lies there, compares the hash. One that takes less compares the size alone: it does not read the others
    for the hash, which rank 0 compared as it chose the checkpoint."""

    def __init__(self, place: Path, store: Store, tiles: Mapping[str, TensorTile]) -> None:
        self.place, self.index = place, read_index(place)
        self._by_version: dict[int, dict[str, dict[str, TensorTile]]] = {}
        self._unhashed = set[str]()
        kept = {name for name, var in store.variables.items() if is_kept(var)}
        for version, names in self.wanted(store, kept):
            files = files_for(self.index.files, {name: tiles[name] for name in sorted(names)}, version)
            self._by_version[version] = files
            self._unhashed |= {key for key, stored in files.items() if self._is_taken_whole(key, stored, tiles)}
        self.tiles = tiles

    def wanted(self, store: Store, names: set[str]) -> Iterator[tuple[int, set[str]]]:
        """Yield versions, newest first, and those of some variables that need them."""
        step = self.index.step
        yield step, names
        stepped = ((n, store.variables[n]) for n in store.versioned)
        kept = {var.source if var.role == COPY else n: var.versions for n, var in stepped}
        for version in range(step - 1, -1, -1):
            late = {n for n in names & kept.keys() if version > step - kept[n]}
            if not late:
                break
            yield version, late

    def fill(self, version: int, buffers: Mapping[str, torch.Tensor]) -> set[str]:
        """Fill buffers with a version of their variables; return the names that the checkpoint has."""
        there = set[str]()
        for key, whole in self._by_version[version].items():
            if stored := {name: tile for name, tile in whole.items() if name in buffers}:
                path = self._checked(key)
                fill_tiles(path, {n: Filling(buffers[n], self.tiles[n], tile) for n, tile in stored.items()})
                there |= stored.keys()
        return there

    def _is_taken_whole(self, key: str, stored: Mapping[str, TensorTile], tiles: Mapping[str, TensorTile]) -> bool:
        file = self.index.files[key]
        sliced = any(tile.ranges != tiles[name].ranges for name, tile in stored.items())
        return not sliced and (not file.tiles or stored.keys() == file.tensors.keys())

    def _checked(self, key: str) -> Path:
        """Return the path of a file, once it is checked."""
        if key in self._unhashed:
            path = check_file(self.place, self.index, key)
            self._unhashed.remove(key)
            return path
        path, size = self.place / key, self.index.files[key].size
        if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
            raise VerifyError(
                f"the checkpoint is damaged: {key} is not a plain file of {size} bytes",
                where=str(self.place),
                hint="resume from an older checkpoint",
            )
        return path


def load_state(files: StageFiles, store: Store, variables: Mapping[str, Var]) -> None:
    """Fill some variables of a stage from a checkpoint. The store is at the checkpoint's step; variables that have
    values without it keep them."""
    names = {name for name, var in variables.items() if is_kept(var)}
    (_, newest), *older = files.wanted(store, names)
    files.fill(files.index.step, {name: store.newest(name) for name in sorted(newest)})
    copies = fill_copies(store, variables)
    for version, late in older:
        # Only the copy has versions of a parameter that updates alone read.
        passing = {name: store.newest(name).clone() for name in sorted(late - store.versioned.keys())}
        buffers = {name: store.restore_older(version, name) for name in sorted(late - passing.keys())} | passing
        missing = buffers.keys() - files.fill(version, buffers)
        for name in missing - passing.keys():
            # It was saved where one version was enough.
            buffers[name].copy_(store.of_version(name, version + 1))
        for var in (var for var in copies if var.source in buffers):
            lacking = var.source in missing
            source = store.of_version(var.name, version + 1) if lacking else buffers[var.source]
            store.restore_older(version, var.name).copy_(source)


def fill_copies(store: Store, variables: Mapping[str, Var]) -> list[Var]:
    """Round the newest parameters into their copies; return those among some variables."""
    copies = [var for var in variables.values() if var.role == COPY]
    for var in copies:
        store.newest(var.name).copy_(store.newest(var.source))
    return copies


class Filling(NamedTuple):
    """A tensor to fill: the tile of the whole that it holds, and the one that the file holds."""

    tensor: torch.Tensor
    wanted: TensorTile
    stored: TensorTile


def fill_tiles(path: Path, into: Mapping[str, Filling]) -> None:
    """Fill tensors from a safetensors file that was checked, and read no more of it than they take. Padding stays as it
    is. The file is mapped anew now and then: pages of it that were read count as memory of the process."""
    pieces = [piece for name, filling in into.items() for piece in _pieces(name, filling)]
    try:
        while pieces:
            with safe_open(path, framework="pt", device="cpu") as file:
                mapped = 0
                while pieces and (not mapped or mapped + pieces[0].nbytes <= _MAPPED):
                    piece = pieces.pop(0)
                    mapped += piece.nbytes
                    _copy(file, piece, path)
    except SafetensorError as error:
        raise VerifyError(str(error), where=str(path)) from error


class _FilePiece(NamedTuple):
    """A piece of a tensor in a file: the shape that the file should have, and where the piece is from and goes to."""

    name: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    slices: SharedSlices
    nbytes: int


def _pieces(name: str, filling: Filling) -> Iterator[_FilePiece]:
    """Yield what a tensor takes from a file, in pieces along its first dimension."""
    tensor, wanted, stored = filling
    for slices in overlaps(stored, wanted):
        part = tensor[slices.other]
        nbytes = part.numel() * part.element_size()
        parts = list(_cut(slices, -(-nbytes // _MAPPED))) if nbytes > _MAPPED else [slices]
        for piece in parts:
            yield _FilePiece(name, stored.shape, tensor, piece, nbytes // len(parts))


def _cut(slices: SharedSlices, pieces: int) -> Iterator[SharedSlices]:
    """Yield slices in so many pieces along the first dimension, or as many as there are elements."""
    (one, *inner), (other, *others) = slices
    size = one.stop - one.start
    step = -(-size // pieces)
    for at in range(0, size, step):
        end = min(at + step, size)
        yield SharedSlices(
            (slice(one.start + at, one.start + end), *inner), (slice(other.start + at, other.start + end), *others)
        )


def _copy(file: Any, piece: _FilePiece, path: Path) -> None:
    """Copy a piece from a file."""
    slices = file.get_slice(piece.name)
    # A file with another shape than its index says shares no slice that could be trusted.
    if tuple(slices.get_shape()) != piece.shape:
        raise VerifyError(f"{piece.name} is {slices.get_shape()}, expected {list(piece.shape)}", where=str(path))
    part = slices[piece.slices.one]
    if part.dtype != piece.tensor.dtype:
        raise VerifyError(f"{piece.name} is {part.dtype}, expected {piece.tensor.dtype}", where=str(path))
    piece.tensor[piece.slices.other].copy_(part)
