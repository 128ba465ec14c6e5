"""The bundle: a compiled program as a directory that can be moved, checked and run.

    manifest.json        format, name, source hash, back end, tool versions,
                         ranks (host, device, stage, threads, files), files (size, SHA-256)
    manifest.sha256      hash of the manifest itself, as `sha256sum -c` reads it
    manifest.hmac        signature of the manifest, where it is signed (signing.py)
    module.ir            the final IR: the program the workers run
    rungs/N/module.ir    the same at smaller sizes N of bounded dimensions (ir/ladder)
    reference.ir         the same model before it was cut into stages, for `penstock verify` to compare with
    plan.json            why it was cut this way (free form, for readers and tools)
    cluster.toml         the devices it was compiled for, when a cluster was given
    stages/...           compiled code, one or more files per stage
    weights/sN.safetensors   the initial values that stage N needs, and no others
    source/names.json        the names that the source model has for the variables whose elements it stored, several for
                             tied ones, and for inputs and outputs that are spelled otherwise here; names of other
                             values come after a %
    source/model.onnx        the source model without those elements, when it was an ONNX file, for `penstock export`
    source/model.onnx.data   elements that stay with the source model, where it had them in a file of their own
    generation/...           what a bundle that generates text needs: facts.json, and the tokenizer's files
    source/rest.safetensors  tensors of the state dict that are no variables, when the source model was of torch

`open_bundle` checks names, sizes and hashes of all files before any of them is parsed or loaded, and reports all
problems in one error. Names in a manifest are relative, contain no `..`, and links are refused. Bundles are written by
writer.py.

A bundle is code: hashes find damage, they do not make a stranger's bundle safe to run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy.typing as npt

from penstock.backends.registry import BACKENDS
from penstock.ir.files import read_module
from penstock.ir.graph import COPY, Module, Var, stage_vars
from penstock.ir.ladder.bounds import sizes_of
from penstock.ir.ladder.ladder import Ladder, Rung
from penstock.support import notebook
from penstock.support.errors import UsageError, VerifyError
from penstock.support.words import itemised

from .signing import SIGNATURE, check_signature, key_in_use
from .tensor_file import map_tensors

FORMAT = 1
MANIFEST, MANIFEST_HASH, MODULE, REFERENCE = "manifest.json", "manifest.sha256", "module.ir", "reference.ir"
PLAN, CLUSTER, RUNGS = "plan.json", "cluster.toml", "rungs"
SOURCE, NAMES, STRUCTURE, REST = "source", "source/names.json", "source/model.onnx", "source/rest.safetensors"
_MOST_THREADS = 1 << 16


class FileEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The hash and the size that a file of the bundle must have."""

    sha256: str
    size: int


class RankEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """One process of a run. `files` are the names of the files that it loads besides the module. Of a rank that runs
    several stages, `stage` is the first, and `packed` has the files of each."""

    rank: int
    host: str
    device: str
    stage: int
    threads: int
    files: tuple[str, ...]
    packed: dict[str, tuple[str, ...]] = {}

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(map(int, self.packed))) or (self.stage,)


class Manifest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The content of `manifest.json`."""

    format: int
    name: str
    source_hash: str
    backend: str
    tools: dict[str, str]
    ranks: tuple[RankEntry, ...]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Origin:
    """The part of the source model that a bundle keeps: its names for variables, and files with the rest of it."""

    names: Mapping[str, Sequence[str]]
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: every file that it lists, or every file that one rank needs, was checked."""

    path: Path
    manifest: Manifest

    def __repr__(self) -> str:
        return notebook.in_one_line(self)

    def _repr_html_(self) -> str:
        return notebook.as_html(self)

    def bytes_of(self, names: Iterable[str]) -> int:
        """Return the total size of some of its files."""
        return sum(self.manifest.files[name].size for name in names if name in self.manifest.files)

    @cached_property
    def module(self) -> Module:
        module = read_module(self.path / MODULE)
        # A manifest and a module that were not written together would start ranks without a stage.
        listed = [(entry.stages, entry.device) for entry in self.manifest.ranks]
        numbers = [stage.index for stage in module.stages]
        if numbers != list(range(len(numbers))) or listed != list(
            zip(module.rank_packs(), module.rank_devices(), strict=True)
        ):
            raise VerifyError(
                f"{MANIFEST} lists other ranks than {MODULE}",
                where=str(self.path),
                hint="compile it again, or copy it again",
            )
        return module

    @cached_property
    def ladder(self) -> Ladder[Module]:
        """The modules of all sizes; of a bundle without bounded dimensions its module alone."""
        others = [read_module(self.path / name) for name in self.manifest.files if name.startswith(f"{RUNGS}/")]
        for other in others:
            if (other.rank_stages(), other.rank_devices()) != (self.module.rank_stages(), self.module.rank_devices()):
                raise VerifyError("its rungs have other ranks than its module", where=str(self.path))
        return Ladder([Rung(sizes_of(module.bounds), module) for module in (self.module, *others)])

    @cached_property
    def reference(self) -> Module | None:
        """The model before it was cut into stages, when the bundle has it."""
        path = self.path / REFERENCE
        return read_module(path) if REFERENCE in self.manifest.files else None

    @cached_property
    def plan(self) -> dict[str, Any]:
        try:
            plan = json.loads((self.path / PLAN).read_bytes())
        except (ValueError, RecursionError) as error:
            raise VerifyError(f"{PLAN}: {error}", where=str(self.path)) from error
        if not isinstance(plan, dict):
            raise VerifyError(f"{PLAN}: expected an object", where=str(self.path))
        return plan

    @cached_property
    def source_names(self) -> dict[str, list[str]] | None:
        """The source model's names of every variable that it stored, and of inputs and outputs that it spells
        otherwise; of other such values, too, with a % before our name. None in a bundle of a module that no frontend
        read."""
        if NAMES not in self.manifest.files:
            return None
        path = self.path / NAMES
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise VerifyError(str(error), where=str(path)) from error

    @property
    def renamed(self) -> dict[str, str]:
        """The source model's names of inputs and outputs that are spelled otherwise here."""
        names, values = (
            self.source_names or {},
            [*(value.name for value in self.module.data_inputs), *self.module.outputs],
        )
        return {name: names[name][0] for name in values if names.get(name)}

    @property
    def source_structure(self) -> Path | None:
        """The ONNX model without its weights, when the bundle was compiled from one."""
        return self.path / STRUCTURE if STRUCTURE in self.manifest.files else None

    @property
    def source_rest(self) -> Path | None:
        """Tensors of the state dict that are no variables, when the bundle was compiled from a torch module."""
        return self.path / REST if REST in self.manifest.files else None

    @property
    def module_hash(self) -> str:
        """The hash of the module, which all ranks of a group must agree on."""
        return self.manifest.files[MODULE].sha256

    @property
    def world_size(self) -> int:
        return len(self.manifest.ranks)

    def rank(self, rank: int) -> RankEntry:
        return self.manifest.ranks[rank]

    def stage_files(self, stage: int) -> tuple[Path, ...]:
        """Return the compiled code of a stage, in the order of the back end's files."""
        names = next(r.packed.get(str(stage), r.files) for r in self.manifest.ranks if stage in r.stages)
        return tuple(self.path / name for name in names if name.startswith("stages/"))

    def weights_file(self, stage: int) -> Path:
        return self.path / weights_name(stage)

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """Map the initial values of the variables of all stages into memory."""
        stages = dict.fromkeys(stage for entry in self.manifest.ranks for stage in entry.stages)
        return {name: array for stage in stages for name, array in map_tensors(self.weights_file(stage)).items()}


def stored_vars(module: Module) -> dict[str, Var]:
    """Return the variables of all stages that begin with elements of the source model."""
    variables = {name: var for stage in module.stages for name, var in stage_vars(module, stage.index).items()}
    return {name: var for name, var in variables.items() if var.init == "file" and var.role != COPY}


def weights_name(stage: int) -> str:
    return f"weights/s{stage}.safetensors"


# ------------------------------------------------------------------------------------------------ reading


def open_bundle(path: str | os.PathLike[str], rank: int | None = None, *, unsigned: bool = False) -> Bundle:
    """Check a bundle and open it. With `rank`, only the common files and those of that rank need to be there. With
    `unsigned`, bundles without a signature are opened even where bundles must be signed."""
    root, manifest = _find_manifest(path, unsigned)
    problems = _structure_problems(root, manifest)
    if not problems:
        names = _names_for(manifest, rank)
        problems = [
            p
            for name in names
            for p in file_problems(root / name, manifest.files[name].sha256, manifest.files[name].size, name)
        ]
    if problems:
        raise VerifyError(
            "the bundle is damaged:" + itemised(problems), where=str(path), hint="compile it again, or copy it again"
        )
    return Bundle(root, manifest)


def listed_ranks(path: str | os.PathLike[str]) -> tuple[RankEntry, ...]:
    """Return the ranks that a bundle is for, as its manifest lists them; no other file is looked at."""
    return _find_manifest(path)[1].ranks


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_problems(path: Path, sha256: str, size: int, name: str) -> list[str]:
    """Return what is wrong with one file: nothing, or one line. Links are never followed."""
    if not os.path.lexists(path):
        return [f"{name}: missing"]
    if path.is_symlink() or not path.is_file():
        return [f"{name}: is a link or not a plain file"]
    actual_size, digest = path.stat().st_size, hash_file(path)
    if digest == sha256:
        return []
    sizes = "" if actual_size == size else f" ({actual_size} bytes, expected {size})"
    return [f"{name}: SHA-256 is {digest}, expected {sha256}{sizes}"]


def contained(name: str) -> bool:
    """Return whether a file name from outside stays inside the directory it is joined to."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and not name.startswith("/")
        and "\\" not in name
        and "\0" not in name
        and ".." not in parts
        and str(PurePosixPath(name)) == name
    )


def _find_manifest(path: str | os.PathLike[str], unsigned: bool = False) -> tuple[Path, Manifest]:
    root = Path(os.path.abspath(path))
    if not root.is_dir():
        raise UsageError(
            "is not a bundle directory", where=str(path), hint="`penstock compile MODEL -o BUNDLE` makes one"
        )
    return root, _read_manifest(root, None if unsigned else key_in_use())


def _read_manifest(root: Path, key: bytes | None) -> Manifest:
    def refuse(what: str, hint: str = "compile it again, or copy it again") -> VerifyError:
        return VerifyError(what, where=str(root / MANIFEST), hint=hint)

    for name in (MANIFEST, MANIFEST_HASH):
        if (root / name).is_symlink() or not (root / name).is_file():
            raise VerifyError(
                f"{name}: missing, or not a plain file", where=str(root), hint="is this a bundle directory?"
            )
    text = (root / MANIFEST).read_bytes()
    expected, actual = (root / MANIFEST_HASH).read_bytes(), f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()
    if expected != actual:
        listed = expected[:64].decode("ascii", "replace")
        raise refuse(f"{MANIFEST}: SHA-256 is {actual[:64].decode()}, {MANIFEST_HASH} says {listed}")
    if key is not None:
        check_signature(root, text, key)
    try:
        version = msgspec.json.decode(text, type=dict).get("format")
        if version != FORMAT:
            raise refuse(f"bundle format {version!r}, this version reads format {FORMAT}", "compile the model again")
        return msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refuse(f"{MANIFEST}: {error}") from error


def _names_for(manifest: Manifest, rank: int | None) -> list[str]:
    if rank is None:
        return list(manifest.files)
    if rank >= len(manifest.ranks):
        raise UsageError(f"there is no rank {rank} in a bundle for {len(manifest.ranks)} processes")
    common = [name for name in (MODULE, PLAN, CLUSTER, REFERENCE, NAMES) if name in manifest.files]
    common += [name for name in manifest.files if name.startswith(f"{RUNGS}/")]
    return common + list(manifest.ranks[rank].files)


def _structure_problems(root: Path, manifest: Manifest) -> list[str]:
    problems = [f"{name!r}: not a relative name inside the bundle" for name in manifest.files if not contained(name)]
    problems += [f"{name}: not listed" for name in (MODULE, PLAN) if name not in manifest.files]
    if manifest.backend not in BACKENDS:
        problems.append(f"unknown back end {manifest.backend!r}, expected one of {', '.join(BACKENDS)}")
    problems += [] if manifest.ranks else ["no ranks are listed"]
    for i, entry in enumerate(manifest.ranks):
        if not 1 <= entry.threads <= _MOST_THREADS:
            problems.append(f"rank {i}: {entry.threads} threads, expected 1 to {_MOST_THREADS}")
        for stage in entry.stages:
            if weights_name(stage) not in entry.packed.get(str(stage), entry.files):
                problems.append(f"rank {i}: does not list {weights_name(stage)}")
        problems += [f"rank {entry.rank}: expected rank {i} here"] if entry.rank != i else []
        problems += [
            f"rank {i}: needs {name!r}, which is not listed"
            for name in {*entry.files, *(name for names in entry.packed.values() for name in names)}
            if name not in manifest.files
        ]
    if not problems:
        problems += _stray_files(root, {MANIFEST, MANIFEST_HASH, SIGNATURE, *manifest.files})
    return problems


def _stray_files(root: Path, listed: set[str]) -> list[str]:
    """Return links anywhere and files that the manifest does not list. Missing files are found by their hash."""
    problems = []
    for folder, folders, names in os.walk(root):
        for name in sorted(folders + names):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                problems.append(f"{relative}: is a link")
            elif name in names and relative not in listed:
                problems.append(f"{relative}: not listed in {MANIFEST}")
    return problems
