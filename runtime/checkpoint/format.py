"""Checkpoints: the state of a drained pipeline, for any plan to go on from.

    DIR/latest                       name of the newest checkpoint, replaced in one rename
    DIR/step-000100/index.json       step, samples, seed, model, bundle, and for every tensor its file and version
    DIR/step-000100/index.sha256     hash of the index
    DIR/step-000100/rank0.safetensors          newest parameters, optimiser state, buffers (no gradients); by IR names
    DIR/step-000100/rank0.older.safetensors    the version before, when it is still needed (2bw), by the same names

A checkpoint is there whole or not at all (saving.py). finding.py finds the newest one that is whole. Tensors are
found by name over all files. So a bundle of the same model may load it with other stages, schedule, devices and
microbatches (resuming.py). Two versions of the weights are kept under 2bw. So a run that is resumed on the same bundle
computes bit for bit what an uninterrupted one does.

A tensor that is split over devices lies in several files, each of which holds a tile of it, without padding. The index
gives the type of the whole tensor, and the ranges of every tile (stored_tiles.py). Such a checkpoint is of format 3.

This module holds the format of the files, and reads and checks them: every file against its hash. All ranks must see
the same directory.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import msgspec
import numpy as np

from penstock.backends.bundle.format import contained, file_problems, stored_vars
from penstock.backends.bundle.tensor_file import map_tensors
from penstock.ir.graph import COPY, GRAD, SETTING, Module, Var
from penstock.ir.sharding.tiles import TensorTile
from penstock.runtime.messages.control import DataSpec
from penstock.support.errors import UsageError, VerifyError
from penstock.support.paths import read_plain

from .stored_tiles import SavedFile, files_for, tile_problem, whole_array

# Format 1 did not say how many samples were read, nor seeds and names of the model; it is read, too. Format 3 has
# tiles: checkpoints without them are still written in format 2, which older versions read.
FORMAT, TILED, READABLE = 2, 3, (1, 2, 3)
# An entry of the index takes some hundreds of bytes.
LONGEST_INDEX = 1 << 28
INDEX, INDEX_HASH, LATEST = "index.json", "index.sha256", "latest"


class Index(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The index of a checkpoint. `step` is the number of steps done, which is also the newest version. `samples` is how
    many samples were read for them, and `seed` that of random draws in the model, if it has any. `bundle` is where the
    bundle stood, and `source_hash` that of its model. `tables` are those of the run, the learning rate among them.
    `names` are the model's own names of parameters and other tensors that the model stores. Checkpoints of older
    versions leave empty what they did not write."""

    format: int
    step: int
    module: str
    schedule: str
    microbatches: int
    data: DataSpec | None
    files: dict[str, SavedFile]
    bundle: str = ""
    source_hash: str = ""
    tables: dict[str, tuple[float, ...]] = {}
    samples: int | None = None
    seed: int | None = None
    names: dict[str, tuple[str, ...]] = {}

    def types(self, version: int | None = None) -> dict[str, str]:
        """Return the types of all tensors, or of those that a version has."""
        files = [file for file in self.files.values() if version is None or file.version == version]
        return {name: type for file in files for name, type in file.tensors.items()}


def is_kept(var: Var) -> bool:
    """Return whether a checkpoint holds a variable: gradients are zero in a drained pipeline, tables stand in the
    index, and copies are made of their sources."""
    return var.role not in (GRAD, SETTING, COPY)


def random_seed(module: Module) -> int | None:
    """Return the seed of random draws in a module; None when it draws nothing."""
    seeds = {op.attrs.get("seed", 0) for graph in module.graphs.values() for op in graph.ops if op.kind == "random_key"}
    assert len(seeds) <= 1, f"one training has one seed, found {seeds}"
    return next((seed for seed in seeds if isinstance(seed, int)), None)


def step_name(step: int) -> str:
    return f"step-{step:06}"


def is_saved(name: str) -> bool:
    return re.fullmatch(r"step-[0-9]{6,19}", name) is not None


def saved_step(place: Path) -> int:
    """Return the step of a checkpoint, by its name or by that of one which was replaced."""
    return int(place.name.removeprefix(".").removeprefix("step-").partition(".")[0])


def saved_steps(directory: Path) -> list[Path]:
    """Return the checkpoints that stand in a directory, newest first, whole or not."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if is_saved(p.name) and p.is_dir()), key=saved_step, reverse=True)


def left_behind(directory: Path) -> list[tuple[Path, str]]:
    """Return the hidden files and directories that saves work with, each with its kind: tmp, old or gone
    (saving.py)."""
    if not directory.is_dir():
        return []
    matches = [
        (path, re.fullmatch(r"\.(?:step-[0-9]{6,19}\.[0-9a-f]+\.(tmp|old|gone)|latest\.[0-9a-f]+\.(tmp))", path.name))
        for path in directory.iterdir()
    ]
    return sorted((path, match[1] or match[2]) for path, match in matches if match)


# ------------------------------------------------------------------------------------------------ reading


def read_index(checkpoint: Path) -> Index:
    """Read the index of a checkpoint and check it. VerifyError for a damaged one, UsageError for one of another
    version's format."""
    try:
        text, listed = read_plain(checkpoint / INDEX, LONGEST_INDEX), read_plain(checkpoint / INDEX_HASH, 1 << 10)
    except OSError as error:
        raise VerifyError(f"cannot read the checkpoint: {error}", where=str(checkpoint)) from error
    computed = f"{hashlib.sha256(text).hexdigest()}  {INDEX}\n".encode()
    if computed != listed:
        raise VerifyError(
            f"{INDEX}: SHA-256 is {computed[:64].decode()}, {INDEX_HASH} says {listed[:64].decode('ascii', 'replace')}",
            where=str(checkpoint),
            hint="resume from an older checkpoint",
        )
    try:
        version = json.loads(text).get("format")
        if version not in READABLE:
            readable = " and ".join(map(str, READABLE))
            raise UsageError(
                f"checkpoint format {version!r}, this version reads formats {readable}", where=str(checkpoint)
            )
        index = msgspec.json.decode(text, type=Index)
    except (msgspec.MsgspecError, ValueError, AttributeError, RecursionError) as error:
        raise VerifyError(f"{INDEX}: {error}", where=str(checkpoint)) from error
    if not 0 <= index.step < 2**63:
        raise VerifyError(f"{INDEX}: {index.step} is no number of steps", where=str(checkpoint))
    outside = [name for name in index.files if not contained(name)]
    if outside:
        raise VerifyError(f"{INDEX}: {outside[0]!r} is not a name inside the checkpoint", where=str(checkpoint))
    if index.step < 0 or (index.samples or 0) < 0 or index.microbatches < 1:
        raise VerifyError(f"{INDEX}: step, samples or microbatches is out of range", where=str(checkpoint))
    if problem := _version_problem(index):
        raise VerifyError(f"{INDEX}: {problem}", where=str(checkpoint), hint="resume from an older checkpoint")
    if problem := tile_problem(index.files):
        raise VerifyError(f"{INDEX}: {problem}", where=str(checkpoint), hint="resume from an older checkpoint")
    return index


def _version_problem(index: Index) -> str:
    """Return the contradiction between the step of an index and the versions of its files, or nothing."""
    late = [name for name, file in index.files.items() if file.version > index.step]
    if late:
        return f"{late[0]} is of version {index.files[late[0]].version}, and the checkpoint of step {index.step}"
    lost = sorted(index.types().keys() - index.types(index.step).keys())
    return f"{lost[0]} is in no file of step {index.step}, only in older ones" if lost else ""


def another_model(index: Index, module: Module, source_hash: str, where: str) -> VerifyError | None:
    """Return the error for a checkpoint of another model than the bundle of `module`, as the hashes of their sources
    say. None where they are one, or where the checkpoint has no hash."""
    if index.source_hash in ("", source_hash):
        return None
    return VerifyError(
        f"the checkpoint is of another model: of {index.module} with hash {index.source_hash[:16]}, the bundle is of "
        f"{module.name} with hash {source_hash[:16]}",
        where=where,
        hint=f"its bundle was {index.bundle}" if index.bundle else "",
    )


def read_newest(checkpoint: Path, index: Index, module: Module) -> dict[str, np.ndarray]:
    """Map all stored variables of a bundle's module at the step of a checkpoint. A checkpoint of other variables is
    refused."""
    types = index.types(index.step)
    wanted = stored_vars(module)
    problems = [
        f"{name}: the bundle has {var.type.plain}, the checkpoint {types.get(name, 'nothing')}"
        for name, var in wanted.items()
        if types.get(name) != str(var.type.plain)
    ]
    problems += [f"{name}: the bundle has no such variable" for name in types if name not in module.vars]
    if problems:
        raise VerifyError(
            "the checkpoint does not fit the bundle:" + "".join(f"\n  - {p}" for p in problems), where=str(checkpoint)
        )
    return read_tensors(checkpoint, index, set(wanted))


def read_tensors(checkpoint: Path, index: Index, names: set[str]) -> dict[str, np.ndarray]:
    """Map the newest contents of variables from files that were checked; join those that lie in tiles."""
    parts: dict[str, list[tuple[np.ndarray, TensorTile]]] = {}
    for file, wanted in files_for(index.files, dict.fromkeys(names), index.step).items():
        arrays = map_tensors(check_file(checkpoint, index, file))
        if lost := wanted.keys() - arrays.keys():
            raise VerifyError(
                f"{file} does not hold {', '.join(sorted(lost))}, which the index lists", where=str(checkpoint)
            )
        for name, tile in wanted.items():
            if name in index.files[file].tiles and arrays[name].shape != tile.shape:
                raise VerifyError(
                    f"{file} has {list(arrays[name].shape)} of {name}, expected {list(tile.shape)}",
                    where=str(checkpoint),
                )
            parts.setdefault(name, []).append((arrays[name], tile))
    types = index.types(index.step)
    return {name: whole_array(types[name], held) for name, held in parts.items()}


def check_file(checkpoint: Path, index: Index, name: str) -> Path:
    """Return the path of one file of a checkpoint, once its hash is right."""
    problems = file_problems(checkpoint / name, index.files[name].sha256, index.files[name].size, name)
    if problems:
        raise VerifyError(
            f"the checkpoint is damaged: {problems[0]}", where=str(checkpoint), hint="resume from an older checkpoint"
        )
    return checkpoint / name
