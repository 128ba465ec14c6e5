"""Files of text, and those that hold a module.

In: a path. Out: the text, or the module, whose operations are rows of the op table with
attributes that these have; one error for all that are not. What it means as a whole is for the verifier (ir/verify).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from penstock.ir.verify.problems import LIMIT, Problem, op_window, to_error
from penstock.ir.verify.verifier import verify
from penstock.support.errors import PenstockError, UsageError

from .graph import Module
from .ops import complete_attrs
from .text import parse_module


def read_text(path: Path, expected: str = "expected a text file") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {path}: it is no text, at byte {error.start}", hint=expected) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=expected) from error


def read_module(path: Path, expected: str = "expected an IR file") -> Module:
    text = read_text(path, expected)
    module = parse_module(text, str(path))
    if problems := list(islice(_strange_operations(module), LIMIT)):
        error = to_error(module.name, problems)
        error.where = f"{path}: {error.where}"
        raise error
    return module


def verify_read(module: Module, path: str | Path) -> None:
    """Verify what was read from a path, which errors name."""
    try:
        verify(module)
    except PenstockError as error:
        error.where = f"{path}: {error.where}"
        raise


def _strange_operations(module: Module) -> Iterator[Problem]:
    for graph in module.graphs.values():
        for i, op in enumerate(graph.ops):
            try:
                complete_attrs(op)
            except TypeError as error:
                yield Problem(f"@{graph.name} op {i} ({op.kind})", str(error), op_window(graph, i))
