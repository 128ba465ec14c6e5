"""Files for other programs, by their names' endings.

    .dot .gv    the forward graphs for Graphviz, stages as clusters             dot.py
    .onnx       the model for Netron, with stage, device and kernel of nodes    onnx_file.py
    .json       the schedule as simulated, a Chrome trace                       schedule.py
    .csv        the schedule as a table, an action a row                        schedule.py

Files are there whole or not at all, and replace files of the same name (outputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from penstock.inspection.subject import Subject

# Ending -> module here, and the function that makes the files: it is given what is looked at, a path, and
# how many batches of a schedule to write.
Writer = Callable[[Subject, Path, int], Sequence[Path]]
WRITERS: Mapping[str, tuple[str, str]] = {
    ".dot": ("dot", "write_dot"),
    ".gv": ("dot", "write_dot"),
    ".onnx": ("onnx_file", "write_onnx"),
    ".json": ("schedule", "write_trace_file"),
    ".csv": ("schedule", "write_csv"),
}


def export_files(subject: Subject, paths: Sequence[str], batches: int) -> list[Path]:
    """Write files; the answer is those that were written."""
    written: list[Path] = []
    for path in map(Path, paths):
        module, function = WRITERS[path.suffix]
        write: Writer = getattr(import_module(f"{__name__}.{module}"), function)
        path.parent.mkdir(parents=True, exist_ok=True)
        written += write(subject, path, batches)
    return written
