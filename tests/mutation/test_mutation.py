"""The mutants are what mutants.py says, and a run tells what was noticed from what was not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mutation import run
from mutation.mutants import mutants
from mutation.run import PARTS, chosen, read_equivalent
from mutation.trial import ROOT

SOURCE = '''
"""A docstring."""
LIMIT: int = 3

def check(names, most=2):
    """Another."""
    for i, name in zip("FB", names, strict=True):
        if name == "F" and not i > most:
            continue
        yield f"{name} is wrong", "a message of several words", i - 1
'''
FOUND = {
    "module: 3 -> 4", "check: check returns at once", "check: 2 -> 3", "check: 'FB' -> 'F'", "check: name == 'F' and (not i > most) -> name == 'F' or not i > most",
    "check: name == 'F' and (not i > most) -> not i > most", "check: name == 'F' and (not i > most) -> name == 'F'",
    "check: name == 'F' and (not i > most) -> not (name == 'F' and (not i > most))", "check: name == 'F' -> name != 'F'", "check: 'F' -> 'Fx'",
    "check: not i > most -> i > most", "check: i > most -> i <= most", "check: i > most -> i >= most", "check: continue -> pass",
    "check: i - 1 -> i + 1", "check: i - 1 -> i | 1", "check: 1 -> 2",
}  # fmt: skip


def test_mutants_of_a_small_file() -> None:
    found = list(mutants(SOURCE))
    dropped = [m.name for m in found if m.name.endswith("-> pass") and "yield" in m.name]
    assert len(dropped) == 1
    assert {m.name for m in found} - {*dropped} == FOUND
    assert {m.name for m in found if m.during_import} == {"module: 3 -> 4", "check: 2 -> 3"}
    for mutant in found:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE)), mutant.name


@pytest.mark.parametrize("part", PARTS)
def test_mutants_of_our_files_compile_and_have_names_of_their_own(part: str) -> None:
    for target, found in chosen(PARTS[part]).items():
        assert len({m.name for m in found}) == len(found) > 0, target.path
        for mutant in found[:: 1 + len(found) // 20]:
            compile(mutant.source, target.file, "exec")


def test_a_sample_is_part_of_all_and_the_same_every_time() -> None:
    part = PARTS["programs"]
    some = [m.name for found in chosen(part, sample=20).values() for m in found]
    assert len(some) == 20
    assert some == [m.name for found in chosen(part, sample=20).values() for m in found]
    assert {*some} <= {m.name for found in chosen(part).values() for m in found}


def test_what_is_listed_as_equivalent_exists_and_has_a_reason() -> None:
    names = {(target.path, m.name) for part in PARTS.values() for target, found in chosen(part).items() for m in found}
    assert read_equivalent().keys() <= names
    assert all(read_equivalent().values())


@pytest.mark.slow
def test_a_fault_is_noticed_and_one_that_nobody_could_notice_is_not() -> None:
    words = [
        sys.executable,
        run.__file__,
        "graphs",
        "--only",
        "verify/(verifier|stages).py (_listed|check_staged: 'F'|module: 'typed')",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=Path(ROOT), check=False)
    assert done.returncode == 0, done.stderr
    assert "module: 'typed' -> 'typedx': killed" in done.stdout
