"""Export of weights from a bundle, under the names of the model it was compiled from.

export              a bundle, or a checkpoint of one -> an ONNX file, a safetensors file, or both
export_parameters   a checkpoint alone -> a safetensors file of what it says the model calls its tensors

The ONNX file is the model that was compiled, with its own inputs and outputs (no loss), nodes and names. Initializers
that became variables have the elements of the bundle or the checkpoint, in the initializer's element type. Where
tensors are split over devices, the file says how they lie (device_layouts.py). Everything else is as it was, bit for
bit.

The safetensors file of a torch module is its whole state dict: tied weights under each of their names, and weights that
no output depends on as they were. That of an ONNX model has the bundle's variables that the model stored, by its names
and in its element types: parameters, and constants too large to be written into the program. Where several graphs have
one, the place comes before the name (`If_4/then/weight`). Weights that the loss does not need are in no bundle's
variables, only in the ONNX file.

Weights are the newest of the checkpoint: the older version of 2bw, which only a resumed run needs, is not exported. A
file is written whole or not at all, and replaces a file of the same name, as with `penstock infer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.bundle.format import Bundle, open_bundle, stored_vars
from penstock.backends.bundle.tensor_file import map_tensors, write_tensors
from penstock.backends.bundle.writer import flush_directory
from penstock.ir.graph import PARAM, REPLICAS, Module
from penstock.runtime.checkpoint.finding import directory_meant, find_checkpoint
from penstock.runtime.checkpoint.format import INDEX, LATEST, another_model, read_index, read_newest, read_tensors
from penstock.support.atomic_files import replacing
from penstock.support.errors import UsageError, VerifyError
from penstock.support.paths import is_inside, replacing_problem
from penstock.support.words import counted

if TYPE_CHECKING:
    from onnx import ModelProto

# What follows the name of an ONNX file in that of its external data, as frontends/onnx/structure.py writes it.
DATA = ".data"


@dataclass(frozen=True)
class Exported:
    """The result of an export: the files that were written, the number of tensors that were filled in, and the step of
    their checkpoint."""

    files: tuple[Path, ...]
    tensors: int
    step: int | None


def export(
    source: str | Path,
    *,
    onnx: str | Path | None = None,
    safetensors: str | Path | None = None,
    checkpoint: str | Path | None = None,
    annotate: Callable[[ModelProto], None] | None = None,
) -> Exported:
    """Write the weights of a bundle, as compiled or as in a checkpoint, into its ONNX model or a safetensors file.

    `source` is a bundle, or a checkpoint whose bundle has not moved. From a directory of checkpoints the newest is
    used. `annotate` may write metadata into the ONNX model before it is written.
    """
    outs = {
        flag: Path(os.path.realpath(path))
        for flag, path in (("--onnx", onnx), ("--safetensors", safetensors))
        if path is not None
    }
    bundle, place = _find(Path(source), None if checkpoint is None else Path(checkpoint))
    split = onnx is not None and _is_split(bundle.module)
    changed = place is not None or annotate is not None or split
    _check_places(outs, bundle, changed)
    names = _names_of(bundle, onnx is None)
    if onnx is not None and bundle.source_structure is None:
        raise UsageError(
            "holds no ONNX model to write weights into", where=str(bundle.path), hint="--safetensors writes its weights"
        )
    arrays, step = _weights(bundle, place)
    elements = {name: arrays[variable] for variable, named in names.items() for name in named}
    files: list[Path] = []
    if onnx is not None:
        try:
            from penstock.frontends.onnx.structure import write_model  # lazy: heavy
        except ModuleNotFoundError as error:
            raise UsageError(
                f"an ONNX file is written with {error.name}, which is not installed", where="export", hint=_NO_ONNX
            ) from error

        assert bundle.source_structure is not None
        notes = _notes(bundle, annotate) if split else annotate
        files += write_model(bundle.source_structure, elements, outs["--onnx"], notes)
    if safetensors is not None:
        files.append(_write_safetensors(outs["--safetensors"], elements, bundle))
    return Exported(tuple(files), len(names), step)


def _is_split(module: Module) -> bool:
    """Return whether tensors are split over devices."""
    axes = {axis for stage in module.stages for axis, size in module.mesh_of(stage.index).axes if size > 1}
    return module.is_local and not axes <= {REPLICAS}


def _notes(bundle: Bundle, annotate: Callable[[ModelProto], None] | None) -> Callable[[ModelProto], None]:
    """Return a function that writes how tensors lie, and what else the caller writes."""
    from .device_layouts import write_layouts  # lazy: heavy

    whole = bundle.reference

    def write(model: ModelProto) -> None:
        if whole is not None:
            write_layouts(model, bundle, whole)
        if annotate is not None:
            annotate(model)

    return write


def _find(source: Path, checkpoint: Path | None) -> tuple[Bundle, Path | None]:
    """Return the bundle, and the checkpoint if there is one. A checkpoint alone names the place of its bundle."""
    if not ((source / INDEX).exists() or (directory_meant(source) / LATEST).exists()):
        return open_bundle(source), None if checkpoint is None else find_checkpoint(checkpoint)
    if checkpoint is not None:
        raise UsageError(
            "is a checkpoint itself", where=str(source), hint=f"penstock export BUNDLE --checkpoint {source}"
        )
    place = find_checkpoint(source)
    bundle = read_index(place).bundle
    if not bundle or not Path(bundle).is_dir():
        problem = f"its bundle is no longer at {bundle}" if bundle else "does not say which bundle it is of"
        raise UsageError(problem, where=str(place), hint=f"penstock export BUNDLE --checkpoint {source}")
    return open_bundle(bundle), place


def _check_places(outs: Mapping[str, Path], bundle: Bundle, changed: bool) -> None:
    """Refuse, all at once and before the work, places that cannot be written, and the model's own place if it would be
    `changed`.
    """
    problems = [] if outs else ["nothing to write: give --onnx FILE, --safetensors FILE or both"]
    places = [
        *outs.items(),
        *((flag, path.with_name(path.name + DATA)) for flag, path in outs.items() if flag == "--onnx"),
    ]
    for flag, path in places:
        if problem := replacing_problem(str(path)):
            problems.append(f"{flag} {path}: {problem}")
        elif path.exists() and not path.is_file():
            problems.append(f"{flag} {path}: is not a plain file")
        elif is_inside(str(path), os.path.realpath(bundle.path)):
            problems.append(f"{flag} {path}: is inside the bundle, which would be damaged by it")
    for flag, path in outs.items():
        if (changed or flag != "--onnx") and _is_source(path, bundle):
            problems.append(
                f"{flag} {path}: is the model that the bundle was compiled from, or a copy of it; give the "
                "result another name"
            )
    if len({path for _, path in places}) < len(places):
        problems.append(f"{' and '.join(outs)} name the same file")
    if problems:
        raise UsageError("; ".join(problems), where="export")
    for path in outs.values():
        path.parent.mkdir(parents=True, exist_ok=True)


def _is_source(path: Path, bundle: Bundle) -> bool:
    """Return whether a file, with its external data, is the model that the bundle was compiled from, whatever
    its name."""
    if bundle.source_structure is None or not path.is_file() or path.suffix == ".safetensors":
        return False
    try:
        from penstock.frontends.onnx.source import OnnxFile  # lazy: heavy
    except ModuleNotFoundError as error:
        raise UsageError(
            f"is there already, and without {error.name} it cannot be told from the model",
            where=str(path),
            hint=_NO_ONNX,
        ) from error

    try:
        return OnnxFile(path).digest() == bundle.manifest.source_hash
    except UsageError:  # it is no model
        return False


_NO_ONNX = "pip install onnx, or give another name; --safetensors alone needs no onnx"
_HINT = "weights of graphs inside of functions may stand for several; --safetensors writes them, by names of ours"


def _names_of(bundle: Bundle, alone: bool) -> dict[str, list[str]]:
    """Return the model's names of its variables.

    A parameter without one cannot be written back into an ONNX model; without the model (`alone`) it is written by
    Penstock's name.
    """
    names = bundle.source_names
    if names is None:
        raise UsageError(
            "does not say what its weights are called in the model",
            where=str(bundle.path),
            hint="compile the model again",
        )
    stored = stored_vars(bundle.module)
    names = {name: named for name, named in names.items() if name[0] != "%" and name not in bundle.renamed}
    lost = [name for name, var in stored.items() if var.role == PARAM and name not in names]
    # Weights of few bits are computed when a bundle is written, and are no tensors of the model.
    rounded = [name for name in lost if stored[name].source]
    if lost and alone and (bundle.source_structure is not None or rounded == lost):
        names = {**names, **{name: [name] for name in lost}}
    elif rounded:
        raise UsageError(
            f"{counted(len(rounded), 'parameter')} such as {rounded[0]} were made of the model's weights, which are "
            "not in the bundle",
            where=str(bundle.path),
            hint="--safetensors writes what the bundle has, by names of ours",
        )
    elif lost:
        raise UsageError(
            f"these parameters stand in no one place of the model: {', '.join(lost)}",
            where=str(bundle.path),
            hint=_HINT,
        )
    strange = sorted(names.keys() - stored.keys())
    every = [name for named in names.values() for name in named]
    if strange or len(set(every)) < len(every):
        raise VerifyError(
            f"names of variables do not fit the module: {', '.join(strange) or 'two have one name'}",
            where=str(bundle.path),
        )
    return names


def _weights(bundle: Bundle, place: Path | None) -> tuple[dict[str, np.ndarray], int | None]:
    """Return the elements of all stored variables, memory-mapped, and their step."""
    if place is None:
        files = [map_tensors(bundle.weights_file(entry.stage)) for entry in bundle.manifest.ranks]
        return {name: array for file in files for name, array in file.items()}, None

    index = read_index(place)
    if (refusal := another_model(index, bundle.module, bundle.manifest.source_hash, str(place))) is not None:
        raise refusal
    return read_newest(place, index, bundle.module), index.step


def _write_safetensors(out: Path, arrays: Mapping[str, np.ndarray], bundle: Bundle) -> Path:
    metadata = None
    if bundle.source_rest is not None:
        arrays = {**map_tensors(bundle.source_rest), **arrays}
        metadata = {"format": "pt"}  # transformers does not read files that do not say so
    with replacing(out) as work:
        write_tensors(work, arrays, metadata)
    return out


def export_parameters(place: Path, out: Path) -> tuple[int, int, int]:
    """Write the newest parameters of a checkpoint, and other tensors that the model stores, by its own
    names; their number, bytes, and the step."""
    index = read_index(place)
    if not index.names:
        raise UsageError(
            "does not say what the model calls its tensors",
            where=str(place),
            hint=f"penstock export BUNDLE --checkpoint {place} --safetensors FILE",
        )
    arrays = read_tensors(place, index, set(index.names))
    if lost := sorted(index.names.keys() - arrays.keys()):
        raise VerifyError(f"lacks {', '.join(lost)}, which its index names", where=str(place))
    named = {name: arrays[ours] for ours, names in index.names.items() for name in names}
    with replacing(out) as work:
        write_tensors(work, named, {"format": "pt"})  # transformers does not read files that do not say so
    flush_directory(out.parent)
    return len(named), sum(array.nbytes for array in named.values()), index.step
