"""The option --long of conftest.py: laws alone, each with so many times the examples that it takes otherwise."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from oracles.repository import ROOT

TESTS = """
import pytest
from hypothesis import given, settings, strategies as st

drawn = {"silent": 0, "outspoken": 0, "plain": 0}

@pytest.fixture(scope="module", autouse=True)
def _tell():
    yield
    print(drawn)

@given(st.integers())
def test_silent(n):
    drawn["silent"] += 1

@settings(max_examples=7)
@given(st.integers())
def test_outspoken(n):
    drawn["outspoken"] += 1

def test_plain():
    drawn["plain"] += 1
"""


def test_every_law_takes_so_many_times_its_examples(tmp_path: Path) -> None:
    """Whether a law says how many it takes or not. Control: without the option each takes what it does, and tests that are no laws run, too."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_drawn.py").write_text(TESTS, encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "--rootdir",
        ".",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "test_drawn.py",
    ]
    for more, expected in (
        ((), "{'silent': 40, 'outspoken': 7, 'plain': 1}"),
        (("--long", "3"), "{'silent': 120, 'outspoken': 21, 'plain': 0}"),
    ):
        run = subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        assert expected in run.stdout
