"""Checkpoints: the state of a drained pipeline, and how to go on from it.

    DIR/latest                       name of the newest checkpoint, replaced in one rename
    DIR/step-000100/index.json       step, module, schedule, data position, bundle, and for every tensor its file and version
    DIR/step-000100/index.sha256     hash of the index
    DIR/step-000100/rank0.safetensors          newest parameters, gradients left out, optimiser state, buffers; by the model's names
    DIR/step-000100/rank0.older.safetensors    the version before, when it is still needed (2bw), by the same names

A checkpoint is written into a sibling directory by all ranks, flushed, indexed by rank 0 and renamed: it is there whole or not at all. Two
versions of the weights are kept under 2bw, so that draining the pipeline to save changes nothing: a resumed run computes bit for bit what an
uninterrupted one does. Tensors are found by name over all files, so a bundle with other stages of the same model and schedule can resume.
All ranks must see the same directory. Every file is checked against its hash before it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from ..backends.bundle import Bundle, contained, file_problems, flush_directory, move_into_place, stage_vars, stored_vars
from ..backends.tensor_file import map_tensors, write_tensors
from ..ir.errors import UsageError, VerifyError
from ..ir.graph import GRAD, TABLE, Module, Var
from .control import DataSpec
from .tables import Tables

FORMAT = 1
INDEX, INDEX_HASH, LATEST = "index.json", "index.sha256", "latest"


class SavedFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`version` is that of the parameters in the file; `tensors` maps names to types."""

    sha256: str
    size: int
    version: int
    tensors: dict[str, str]


class Index(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`step` is the number of steps done, which is also the newest version and the next batch to read. `bundle` is where the bundle stood, and
    `source_hash` that of its model; `tables` are those of the run, the learning rate among them. All three are empty in checkpoints of versions
    that did not write them."""

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


# State that belongs to no parameter.
_COUNTERS = ("step", "updates", "loss.scale", "loss.scale.good")


def is_kept(var: Var) -> bool:
    """Whether a checkpoint holds a variable: gradients are zero in a drained pipeline, and tables stand in the index."""
    return var.role not in (GRAD, TABLE)


# ------------------------------------------------------------------------------------------------ writing


def start_save(directory: Path, step: int) -> Path:
    """The working directory of a checkpoint, made by rank 0."""
    directory.mkdir(parents=True, exist_ok=True)
    work = directory / f".{step_name(step)}.{secrets.token_hex(4)}.tmp"
    work.mkdir()
    return work


def save_part(
    work: Path, rank: int, module: Module, newest: Mapping[str, np.ndarray], older: Mapping[int, Mapping[str, np.ndarray]], version: int
) -> bytes:
    """Write the files of one rank; the answer is what rank 0 needs for the index."""
    files: dict[str, SavedFile] = {}
    parts = [(f"rank{rank}.safetensors", version, newest)] + [(f"rank{rank}.older.safetensors", v, arrays) for v, arrays in older.items()]
    for name, of_version, arrays in parts:
        if not arrays:
            continue
        digest, size = write_tensors(work / name, arrays)
        files[name] = SavedFile(digest, size, of_version, {tensor: str(module.vars[tensor].type) for tensor in arrays})
    return msgspec.json.encode(files)


def finish_save(work: Path, directory: Path, step: int, bundle: Bundle, data: DataSpec | None, parts: list[bytes], tables: Tables) -> Path:
    """Index the files of all ranks and put the checkpoint in its place."""
    module = bundle.module
    assert module.schedule is not None
    files = {name: file for part in parts for name, file in msgspec.json.decode(part, type=dict[str, SavedFile]).items()}
    schedule, source_hash = module.schedule, bundle.manifest.source_hash
    index = Index(FORMAT, step, module.name, schedule.name, schedule.microbatches, data, files, str(bundle.path), source_hash, dict(tables))
    text = msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=2) + b"\n"
    _write(work / INDEX, text)
    _write(work / INDEX_HASH, f"{hashlib.sha256(text).hexdigest()}  {INDEX}\n".encode())
    flush_directory(work)
    place = directory / step_name(step)
    move_into_place(work, place)
    pointer = directory / f".{LATEST}.{secrets.token_hex(4)}.tmp"
    _write(pointer, step_name(step).encode() + b"\n")
    pointer.rename(directory / LATEST)
    flush_directory(directory)
    return place


def abandon_save(work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)


def step_name(step: int) -> str:
    return f"step-{step:06}"


def is_saved(name: str) -> bool:
    return name.startswith("step-") and name[5:].isdigit()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------ reading


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that a user's path means: a checkpoint itself, or the newest one of a directory of them."""
    root = Path(os.path.abspath(path))
    if (root / INDEX).exists():
        return root
    hint = "give a directory that --checkpoint wrote"
    if not (root / LATEST).is_file():
        raise UsageError(f"there is no checkpoint: neither {INDEX} nor {LATEST} is there", where=str(path), hint=hint)
    name = (root / LATEST).read_bytes().decode("ascii", "replace").strip()
    if not is_saved(name) or not (root / name).is_dir():
        there = sorted(p.name for p in root.iterdir() if is_saved(p.name))
        raise VerifyError(
            f"{LATEST} names {name!r}, which is not a checkpoint here", where=str(path), hint=f"there are {', '.join(there) or 'none'}"
        )
    return root / name


def read_index(checkpoint: Path) -> Index:
    """The index of a checkpoint, checked."""
    try:
        text, listed = (checkpoint / INDEX).read_bytes(), (checkpoint / INDEX_HASH).read_bytes()
    except OSError as error:
        raise VerifyError(f"cannot read the checkpoint: {error}", where=str(checkpoint)) from error
    found = f"{hashlib.sha256(text).hexdigest()}  {INDEX}\n".encode()
    if found != listed:
        raise VerifyError(
            f"{INDEX}: SHA-256 is {found[:64].decode()}, {INDEX_HASH} says {listed[:64].decode('ascii', 'replace')}",
            where=str(checkpoint),
            hint="resume from an older checkpoint",
        )
    try:
        version = json.loads(text).get("format")
        if version != FORMAT:
            raise VerifyError(f"checkpoint format {version!r}, this version reads format {FORMAT}", where=str(checkpoint))
        index = msgspec.json.decode(text, type=Index)
    except (msgspec.MsgspecError, ValueError, AttributeError) as error:
        raise VerifyError(f"{INDEX}: {error}", where=str(checkpoint)) from error
    outside = [name for name in index.files if not contained(name)]
    if outside:
        raise VerifyError(f"{INDEX}: {outside[0]!r} is not a name inside the checkpoint", where=str(checkpoint))
    return index


def check_resume(index: Index, module: Module, data: DataSpec | None, where: str) -> list[str]:
    """Refuse a checkpoint of another model or schedule; the answer is what differs and may be meant."""
    assert module.schedule is not None
    problems = []
    if index.module != module.name:
        problems.append(f"it is of model {index.module}, the bundle is of {module.name}")
    if index.schedule != module.schedule.name:
        problems.append(f"it is of schedule {index.schedule}, the bundle has {module.schedule.name}")
    if index.microbatches != module.schedule.microbatches:
        problems.append(f"it is of {index.microbatches} microbatches per batch, the bundle has {module.schedule.microbatches}")
    types = {name: type for file in index.files.values() for name, type in file.tensors.items()}
    used = {name: var for stage in module.stages for name, var in stage_vars(module, stage.index).items()}
    for name, var in used.items():
        if is_kept(var) and types.get(name) != str(var.type):
            problems.append(f"{name}: the bundle has {var.type}, the checkpoint {types.get(name, 'nothing')}")
    for name in types.keys() - used.keys():
        # State of the optimiser is named after its parameter, and goes with it.
        if name.rpartition(".")[0] not in types and name not in _COUNTERS:
            problems.append(
                f"{name}: the bundle has no such variable; a small one that is frozen by --frozen is a constant, use a group to freeze it"
            )
    if problems:
        raise VerifyError("the checkpoint does not fit the bundle:" + "".join(f"\n  - {p}" for p in sorted(problems)), where=where)
    if data is not None and index.data is not None and data != index.data:
        return [f"the data is now {_describe(data)}, the checkpoint was trained on {_describe(index.data)}"]
    return []


def read_newest(checkpoint: Path, index: Index, module: Module) -> dict[str, np.ndarray]:
    """All stored variables of a bundle's module at the step of a checkpoint, memory-mapped. Refused is a checkpoint of other variables."""
    types = {name: type for file in index.files.values() if file.version == index.step for name, type in file.tensors.items()}
    wanted = stored_vars(module)
    problems = [
        f"{name}: the bundle has {var.type}, the checkpoint {types.get(name, 'nothing')}"
        for name, var in wanted.items()
        if types.get(name) != str(var.type)
    ]
    problems += [f"{name}: the bundle has no such variable" for name in types if name not in module.vars]
    if problems:
        raise VerifyError("the checkpoint does not fit the bundle:" + "".join(f"\n  - {p}" for p in problems), where=str(checkpoint))
    found: dict[str, np.ndarray] = {}
    for file, names in files_for(index, set(wanted), index.step).items():
        arrays = map_tensors(check_file(checkpoint, index, file))
        found |= {name: arrays[name] for name in names}
    return found


def files_for(index: Index, names: set[str], version: int) -> dict[str, set[str]]:
    """Which files hold the wanted tensors of a version: file name -> tensor names. Names that are nowhere are left out."""
    found: dict[str, set[str]] = {}
    left = set(names)
    for name, file in index.files.items():
        here = left & file.tensors.keys() if file.version == version else set()
        if here:
            found[name] = here
            left -= here
    return found


def check_file(checkpoint: Path, index: Index, name: str) -> Path:
    """The path of one file of a checkpoint, once its hash is right."""
    problems = file_problems(checkpoint / name, index.files[name].sha256, index.files[name].size, name)
    if problems:
        raise VerifyError(f"the checkpoint is damaged: {problems[0]}", where=str(checkpoint), hint="resume from an older checkpoint")
    return checkpoint / name


def _describe(data: DataSpec) -> str:
    last = "" if data.last == "wrap" else f", last batch {data.last}"
    return f"{data.source}{' shuffled' if data.shuffle else ''} with seed {data.seed}{last}"
