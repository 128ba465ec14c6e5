"""Writing checkpoints (what they hold: checkpoint.py).

A checkpoint is written into a sibling directory by all ranks, flushed, indexed by rank 0 and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from ..backends.bundle import Bundle, flush_directory, move_into_place, stored_vars
from ..backends.tensor_file import write_tensors
from ..ir.graph import Module
from .checkpoint import FORMAT, INDEX, INDEX_HASH, LATEST, Index, SavedFile, is_kept, random_seed, step_name
from .control import Setup
from .program import microbatch_size


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


def describe_save(bundle: Bundle, setup: Setup, step: int, files: dict[str, SavedFile]) -> Index:
    """The index of a checkpoint."""
    module = bundle.module
    assert module.schedule is not None
    batch = microbatch_size(module) * module.schedule.microbatches
    theirs = bundle.source_names or {}
    return Index(
        FORMAT,
        step,
        module.name,
        module.schedule.name,
        module.schedule.microbatches,
        setup.data,
        files,
        bundle=str(bundle.path),
        source_hash=bundle.manifest.source_hash,
        tables=dict(setup.tables),
        samples=step * batch + setup.offset,
        # What draws were made from: another seed than the module's when the run went on from a checkpoint with another one.
        seed=None if (seed := random_seed(module)) is None else seed ^ setup.key,
        names={name: tuple(theirs.get(name, (name,))) for name, var in stored_vars(module).items() if is_kept(var)},
    )


def finish_save(work: Path, directory: Path, index: Index) -> Path:
    """Add the index to the files of all ranks and put the checkpoint in its place."""
    write_index(work, index)
    flush_directory(work)
    place = directory / step_name(index.step)
    move_into_place(work, place)
    pointer = directory / f".{LATEST}.{secrets.token_hex(4)}.tmp"
    _write(pointer, step_name(index.step).encode() + b"\n")
    pointer.rename(directory / LATEST)
    flush_directory(directory)
    return place


def write_index(folder: Path, index: Index) -> None:
    text = msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=2) + b"\n"
    _write(folder / INDEX, text)
    _write(folder / INDEX_HASH, f"{hashlib.sha256(text).hexdigest()}  {INDEX}\n".encode())


def abandon_save(work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
