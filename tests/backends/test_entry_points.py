"""Processes that are started by the name of a module: every name leads to a program."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.backends.tvm.entry_points import ENTRY_POINTS, command_of


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_an_entry_point_is_a_module_that_runs_its_main(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    last = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body[-1]
    assert isinstance(last, ast.If)
    assert ast.unparse(last.test) == "__name__ == '__main__'"
    assert command_of(module, "a")[-3:] == ("-m", module, "a")
