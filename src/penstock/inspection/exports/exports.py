"""Files for other programs, by the ending of their names.

    .dot .gv    the forward graphs for Graphviz, stages as clusters             dot.py
    .onnx       the model for Netron, with stage, device and kernel of nodes    onnx_file.py
    .json       the schedule as simulated, a Chrome trace                       schedule.py
    .csv        the schedule as a table, an action a row                        schedule.py

A file is written whole or not at all, and replaces a file of the same name (outputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.inspection.subject import Subject

from .dot import write_dot
from .outputs import ENDINGS
from .schedule import write_csv, write_trace_file

# The caller passes the subject, a path, and the number of batches of a schedule to write.
Writer = Callable[[Subject, Path, int], Sequence[Path]]


def _write_onnx(subject: Subject, path: Path, batches: int) -> Sequence[Path]:
    from .onnx_file import write_onnx  # lazy: heavy

    return write_onnx(subject, path, batches)


WRITERS: Mapping[str, Writer] = dict(
    zip(ENDINGS, (write_dot, write_dot, _write_onnx, write_trace_file, write_csv), strict=True)
)


def export_files(subject: Subject, paths: Sequence[str], batches: int) -> list[Path]:
    """Write the files and return those that were written."""
    written: list[Path] = []
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        written += WRITERS[path.suffix](subject, path, batches)
    return written
