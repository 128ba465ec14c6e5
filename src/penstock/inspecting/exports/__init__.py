"""Files for other programs, by their names' endings.

    .dot .gv    the forward graphs for Graphviz, stages as clusters             dot.py
    .onnx       the model for Netron, with stage, device and kernel of nodes    onnx_file.py
    .json       the schedule as simulated, a Chrome trace                       schedule.py
    .csv        the schedule as a table, an action a row                        schedule.py

Files are there whole or not at all, and replace files of the same name. All that is wrong with where they are to go is one error, before anything is read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from penstock.inspecting.subject import Subject
from penstock.ir.errors import UsageError
from penstock.runtime.places import file_problem, is_inside

# Ending -> module here, and the function that makes the files: it is given what is looked at, a path, and how many batches of a schedule to write.
Writer = Callable[[Subject, Path, int], Sequence[Path]]
WRITERS: Mapping[str, tuple[str, str]] = {
    ".dot": ("dot", "write_dot"),
    ".gv": ("dot", "write_dot"),
    ".onnx": ("onnx_file", "write_onnx"),
    ".json": ("schedule", "write_trace_file"),
    ".csv": ("schedule", "write_csv"),
}


def check_exports(paths: Sequence[str], source: str) -> None:
    """UsageError where a file cannot be written, or nobody knows as what."""
    problems = []
    for path in paths:
        if Path(path).suffix not in WRITERS:
            problems.append(f"{path}: expected a name that ends in {', '.join(WRITERS)}")
        elif problem := file_problem(path):
            problems.append(f"{path}: {problem}")
        elif os.path.isdir(source) and is_inside(os.path.realpath(path), os.path.realpath(source)):
            problems.append(f"{path}: is inside of what is looked at")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        problems.append("the same file is named twice")
    if problems:
        raise UsageError("; ".join(problems), where="--export")


def export_files(subject: Subject, paths: Sequence[str], batches: int) -> list[Path]:
    """Write files; the answer is those that were written."""
    written: list[Path] = []
    for path in map(Path, paths):
        module, function = WRITERS[path.suffix]
        write: Writer = getattr(import_module(f"{__name__}.{module}"), function)
        path.parent.mkdir(parents=True, exist_ok=True)
        written += write(subject, path, batches)
    return written


def write_whole(path: Path, text: str) -> list[Path]:
    """A file of text, renamed into place when it is whole."""
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        work.write_text(text, encoding="utf-8")
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
    return [path]
