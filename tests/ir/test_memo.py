"""Results that graphs and modules keep: typed keys, one per file and name, and what copies share."""

from __future__ import annotations

import ast
import pickle
from copy import copy
from dataclasses import replace

from oracles.repository import ROOT

from penstock.ir.graph import Graph, Module, Note
from penstock.ir.memo import Derived, Memo

FOLDERS = ("ir", "frontends", "passes", "backends", "runtime", "src/penstock")
_COUNT = Derived[int](__name__, "count")


def test_a_result_is_computed_once() -> None:
    memo, asked = Memo(), list[int]()

    def find() -> int:
        asked.append(1)
        return len(asked)

    assert memo.get(_COUNT) is None
    assert (memo.once(_COUNT, find), memo.once(_COUNT, find), memo.get(_COUNT)) == (1, 1, 1)
    memo.put(_COUNT, 7)
    assert memo.get(_COUNT) == 7


def test_files_share_no_key() -> None:
    memo = Memo()
    memo.put(_COUNT, 1)
    assert memo.get(Derived[int]("another.file", "count")) is None


def test_copies_and_pickles() -> None:
    """A copy that is changed forgets; one that differs in facts and notes alone, and a pickle, remember."""
    graph = Graph("F", (), (), ())
    assert graph.keep(_COUNT, lambda graph: 3) == 3
    assert pickle.loads(pickle.dumps(graph)).kept.get(_COUNT) == copy(graph).kept.get(_COUNT) == 3
    assert replace(graph, name="B").kept.get(_COUNT) is None
    assert graph == Graph("F", (), (), ())
    module = Module("m")
    module.kept.put(_COUNT, 5)
    assert module.but(notes=(Note("a", "b"),)).kept.get(_COUNT) == 5
    assert module.but(name="n").kept.get(_COUNT) is None


def test_keys_are_declared_with_the_name_of_their_file_once() -> None:
    paths = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    seen = []
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Derived["):
                file, name = map(ast.unparse, node.args)
                assert file == "__name__", path
                seen.append((path, name))
    assert len(seen) == len(set(seen)) >= 8
