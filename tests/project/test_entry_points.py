"""Modules that are named by strings: every name leads to a module with its work, and no other file starts one."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.support.entry_points import ENTRY_POINTS, command_line
from penstock.support.processes import command_of

from .source_tree import SourceFile, made_up, product

# What is called there; all others are processes, which call `main`.
WORK = {"rank": "serve_rank", "notebook": "as_html"}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_an_entry_point_is_a_module_with_its_work(name: str) -> None:
    spec = find_spec(ENTRY_POINTS[name])
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    assert WORK.get(name, "main") in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _starts_modules(source: SourceFile) -> bool:
    strings = [node.value for node in source.nodes if isinstance(node, ast.Constant)]
    return "-m" in strings


def test_no_other_file_starts_a_module() -> None:
    starting = [name for name, source in product().items() if _starts_modules(source)]
    assert starting == ["penstock.support.entry_points"]


def test_a_started_module_is_noticed() -> None:
    assert _starts_modules(made_up(a='run([sys.executable, "-m", name])')["penstock.a"])


def test_commands_begin_where_the_table_says() -> None:
    assert command_line("forkserver")[1:] == ["-P", "-m", ENTRY_POINTS["forkserver"]]
    assert command_of("join")[1:] == ["-P", "-m", ENTRY_POINTS["begin"], "join"]
