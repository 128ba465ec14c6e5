"""Verdicts on disk, so that a run that was ended early goes on where it was, and one after new tests tries again only what they may change.

A verdict holds as long as its words do: the mutated function as it stands in the mutant, the file of the test that failed, or for a survivor all
files of tests it was tried with. Limit: what changes elsewhere (other functions, conftest.py) is not looked at; delete the file to try all again.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutation.mutants import Mutant
from mutation.trial import KILLED, ROOT, Target, Verdict


class Kept:
    """One line for each verdict; of two on the same mutant the later one counts."""

    def __init__(self, file: Path, tests: Sequence[str], budget: float) -> None:
        self.file = file
        self._tests = {test: _digest((ROOT / test).read_text(encoding="utf-8")) for test in tests}
        self._budget = budget
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._rows: dict[tuple[str, str], Mapping[str, str]] = {
            (row["path"], row["name"]): row for row in map(json.loads, lines)
        }

    def find(self, target: Target, mutant: Mutant) -> Verdict | None:
        row = self._rows.get((target.path, mutant.name))
        if row is None or row["words"] != self._words(mutant, row["ended"], row["by"]):
            return None
        return Verdict(target, mutant, row["ended"], row["by"])

    def add(self, verdict: Verdict) -> None:
        words = self._words(verdict.mutant, verdict.ended, verdict.by)
        row = {
            "path": verdict.target.path,
            "name": verdict.mutant.name,
            "ended": verdict.ended,
            "by": verdict.by,
            "words": words,
        }
        self._rows[row["path"], row["name"]] = row
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    def _words(self, mutant: Mutant, ended: str, by: str) -> str:
        test = by.split("::")[0]
        tests = (
            [self._tests[test]]
            if ended == KILLED and test in self._tests
            else [f"{self._budget}", *self._tests.values()]
        )
        return _digest("\n".join([_mutated(mutant), *tests]))


def _mutated(mutant: Mutant) -> str:
    """The function or class at the top of the file that the change is in; the whole file if there is none, or it runs at import."""
    name = mutant.function.split(".")[0]
    for node in mutant.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and not mutant.during_import:
            return ast.unparse(node)
    return mutant.source


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
