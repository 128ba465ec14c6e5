"""Writing a bundle (format.py says what is in one). In: a module, files of the back end, weights. Out: a directory.

`write_bundle` fills a sibling directory, flushes it and renames it into place: a bundle is there whole or not at all.
The same inputs give the same bytes; the bundle has no time, path or host name of the build in it. It is signed where
PENSTOCK_BUNDLE_KEY names a key (signing.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.ir.graph import Module, stage_vars
from penstock.ir.ladder.ladder import Ladder
from penstock.ir.text import print_module
from penstock.ir.types import dtype_of
from penstock.support.atomic_files import naming
from penstock.support.errors import UsageError, VerifyError
from penstock.support.hardware import usable_cores
from penstock.support.paths import directory_problem
from penstock.support.words import itemised

from .format import (
    CLUSTER,
    FORMAT,
    MANIFEST,
    MANIFEST_HASH,
    MODULE,
    NAMES,
    PLAN,
    REFERENCE,
    RUNGS,
    SOURCE,
    Bundle,
    FileEntry,
    Manifest,
    Origin,
    RankEntry,
    open_bundle,
    stored_vars,
    weights_name,
)
from .signing import SIGNATURE, key_in_use, signature_of
from .tensor_file import write_tensors

_TOOLS = ("penstock", "apache-tvm", "apache-tvm-ffi", "numpy", "torch", "onnx")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Provenance:
    """The source of a program: the hash of the source model, its module before the cut into stages, its names and
    files. `attachments` are files by their names in the bundle. `tools` are the versions of the tools that made the
    program, by default those that are installed."""

    source_hash: str = ""
    reference: Module | None = None
    origin: Origin | None = None
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    tools: Mapping[str, str] | None = None


_UNKNOWN = Provenance()


def write_bundle(
    out_dir: str | os.PathLike[str],
    module: Module,
    stage_files: Mapping[int, Sequence[Path]],
    weights: Mapping[str, np.ndarray],
    *,
    backend: str,
    plan: Mapping[str, Any] | None = None,
    provenance: Provenance = _UNKNOWN,
    ladder: Ladder[Module] | None = None,
) -> Bundle:
    """Write a bundle in place of nothing, of an empty directory or of another bundle, and return it opened.

    `stage_files` are the files that the back end made for each stage; `weights` has an array for every variable with
    `init file`. `ladder` has the modules of all sizes, of which `module` is the largest.
    """
    out = Path(os.path.abspath(out_dir))
    check_replaceable(out)
    key = key_in_use()
    _check_weights(module, weights)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = _FileWork(out.parent / f".{out.name}.{secrets.token_hex(4)}.tmp")
    work.folder.mkdir()
    try:
        _add_texts(work, module, plan or {}, provenance)
        for rung in ladder or ():
            if rung.held is not module:
                work.add_text(f"{RUNGS}/{rung.name}/{MODULE}", print_module(rung.held))
        of_stage = _add_stages(work, module, stage_files, weights)
        ranks = zip(module.rank_packs(), module.rank_devices(), strict=True)
        manifest = Manifest(
            FORMAT,
            module.name,
            provenance.source_hash,
            backend,
            dict(provenance.tools if provenance.tools is not None else tool_versions()),
            tuple(
                _rank_entry(module, rank, device, {stage: of_stage[stage] for stage in stages})
                for rank, (stages, device) in enumerate(ranks)
            ),
            work.files,
        )
        work.seal(manifest, key)
        move_into_place(work.folder, out)
    except BaseException:
        shutil.rmtree(work.folder, ignore_errors=True)
        raise
    return Bundle(out, manifest)


@dataclass(slots=True)
class _FileWork:
    """The directory that becomes a bundle, and the files that it already has."""

    folder: Path
    files: dict[str, FileEntry] = field(default_factory=dict)

    def add(self, name: str, write: Callable[[Path], tuple[str, int]]) -> str:
        """Add a file, given the function that writes it and returns its hash and size; return its name."""
        if name in self.files:
            raise UsageError(
                f"two files of the bundle are called {name}", hint="name the files of a stage after the stage"
            )
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with naming(self.folder / name):
            self.files[name] = FileEntry(*write(self.folder / name))
        return name

    def add_text(self, name: str, text: str) -> str:
        return self.add(name, lambda path: _write_bytes(path, text.encode()))

    def seal(self, manifest: Manifest, key: bytes | None) -> None:
        """Add the manifest, its hash and signature, and flush all directories."""
        text = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"
        digest, _ = _write_bytes(self.folder / MANIFEST, text)
        _write_bytes(self.folder / MANIFEST_HASH, f"{digest}  {MANIFEST}\n".encode())
        if key is not None:
            _write_bytes(self.folder / SIGNATURE, signature_of(key, text))
        for folder in {self.folder, *(path.parent for path in map(self.folder.joinpath, self.files))}:
            flush_directory(folder)


def _add_texts(work: _FileWork, module: Module, plan: Mapping[str, Any], provenance: Provenance) -> None:
    """Add the module, the plan, the cluster, and what is kept of the source model."""
    work.add_text(MODULE, print_module(module))
    work.add_text(PLAN, _json(plan))
    if provenance.reference is not None:
        work.add_text(REFERENCE, print_module(provenance.reference))
    if module.cluster is not None:
        work.add_text(CLUSTER, module.cluster.to_toml())
    for name, data in provenance.attachments.items():
        work.add(name, partial(_write_bytes, data=data))
    origin = provenance.origin
    if origin is not None:
        work.add_text(NAMES, _json({var: list(names) for var, names in origin.names.items()}, ensure_ascii=False))
        for file in origin.files:
            work.add(f"{SOURCE}/{file.name}", partial(_copy, file))


def _add_stages(
    work: _FileWork, module: Module, stage_files: Mapping[int, Sequence[Path]], weights: Mapping[str, np.ndarray]
) -> dict[int, list[str]]:
    """Add the files of the back end and the weights; return their names, by stage."""
    stages = [stage.index for stage in module.stages]
    added: dict[Path, str] = {}
    names: dict[int, list[str]] = {stage: [] for stage in stages}
    for stage in stages:
        for file in stage_files.get(stage, ()):
            # Stages may have a file in common.
            if file not in added:
                added[file] = work.add(f"stages/{file.name}", partial(_copy, file))
            names[stage].append(added[file])
    (work.folder / "weights").mkdir()
    with ThreadPoolExecutor(max(1, min(len(stages), usable_cores()))) as threads:
        # Copying, hashing and flushing all happen outside the interpreter.
        written = list(threads.map(lambda stage: _write_weights(work.folder, module, stage, weights), stages))
    for stage, (digest, size) in zip(stages, written, strict=True):
        name = weights_name(stage)
        work.files[name] = FileEntry(digest, size)
        names[stage].append(name)
    return names


def _json(content: Mapping[str, Any], ensure_ascii: bool = True) -> str:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=ensure_ascii) + "\n"


def sign_bundle(path: str | os.PathLike[str], key: bytes) -> Path:
    """Sign a bundle that is whole; return the file of the signature, which replaces an older one."""
    root = open_bundle(path, unsigned=True).path
    target, fresh = root / SIGNATURE, root.parent / f".{root.name}.{secrets.token_hex(4)}.hmac"
    try:
        _write_bytes(fresh, signature_of(key, (root / MANIFEST).read_bytes()))
        fresh.replace(target)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise UsageError(f"cannot be written: {error.strerror or error}", where=str(target)) from error
    flush_directory(root)
    return target


def _write_weights(work: Path, module: Module, stage: int, weights: Mapping[str, np.ndarray]) -> tuple[str, int]:
    stored = stored_vars(module)
    arrays = {name: weights[name] for name in stage_vars(module, stage) if name in stored}
    path = work / weights_name(stage)
    with naming(path):
        return write_tensors(path, arrays)


def tool_versions() -> dict[str, str]:
    """Return the versions of the tools that had a part in the result, without importing any of them."""
    versions = {}
    for name in _TOOLS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def move_into_place(work: Path, out: Path) -> None:
    """Rename a finished directory to its place; a directory that was there before is removed afterwards."""
    old = out.parent / f".{out.name}.{secrets.token_hex(4)}.old"
    if out.exists():
        out.rename(old)
    work.rename(out)
    flush_directory(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank_entry(module: Module, rank: int, place: str, of_stage: Mapping[int, Sequence[str]]) -> RankEntry:
    host, threads = "localhost", 1
    if module.cluster is not None:
        device = module.cluster.device(place)
        host, threads = device.host, device.threads
    files = tuple(dict.fromkeys(name for names in of_stage.values() for name in names))
    packed = {str(stage): tuple(names) for stage, names in of_stage.items()} if len(of_stage) > 1 else {}
    return RankEntry(rank, host, place, next(iter(of_stage)), threads, files, packed)


def check_replaceable(out: Path) -> None:
    """Refuse a place where no bundle may be written: before the work, and again at its end."""
    if not os.path.lexists(out):
        parent = next(folder for folder in Path(os.path.abspath(out)).parents if folder.exists())
        if directory_problem(str(parent)):
            raise UsageError(
                f"cannot be made: {parent} is no directory that may be written to",
                where=str(out),
                hint="give another name",
            )
        return
    if out.is_symlink() or not out.is_dir():
        raise UsageError("is in the way: it is not a directory", where=str(out), hint="give another name")
    if any(out.iterdir()) and not _looks_like_bundle(out):
        raise UsageError(
            "is a directory with other files in it, and not a bundle",
            where=str(out),
            hint="give another name, or remove it yourself",
        )


def _looks_like_bundle(path: Path) -> bool:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"format", "ranks", "files"} <= manifest.keys()


def _check_weights(module: Module, weights: Mapping[str, np.ndarray]) -> None:
    problems = []
    for name, var in stored_vars(module).items():
        array = weights.get(name)
        if array is None:
            problems.append(f"{name}: no weights were given")
        elif (dtype_of(array.dtype), array.shape) != (var.type.dtype, var.type.dims):
            problems.append(
                f"{name}: the variable is {var.type}, "
                f"its weights are {dtype_of(array.dtype)}[{','.join(map(str, array.shape))}]"
            )
    if problems:
        raise VerifyError("weights do not fit the module:" + itemised(problems), where=f"module @{module.name}")


def _write_bytes(path: Path, data: bytes) -> tuple[str, int]:
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest(), len(data)


def _copy(source: Path, path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, path.open("wb") as writer:
        while data := reader.read(_CHUNK):
            writer.write(data)
            digest.update(data)
            size += len(data)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest(), size
