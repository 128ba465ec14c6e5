"""The rule that files named in docstrings, comments and pages exist.

A docstring or comment names a file as it lies in its own room, in a room around that, in `src/penstock` or in the
repository. A page names it by its path from the page or the repository, from `src/penstock`, or by its name alone.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from oracles.repository import ROOT

from .source_tree import Sources, made_up, product
from .test_docs import FENCE, PAGES

PACKAGE = ROOT / "src" / "penstock"
_FILE = re.compile(r"(?<![\w/.<{*-])((?:\.\./)*(?:[a-z_][a-z_\d-]*/)*[a-z_]\w*\.(?:py|md))\b(?!/)")
_FOLDER = re.compile(
    r"(?<![\w/.<{*-])((?:ir|frontends|passes|backends|runtime|src|tests|docs)/(?:[a-z_\d]+/)*)(?![\w<{*.])"
)
# Files that a page makes up, or that are those of another project.
_EXAMPLES = ("utils.py", "passes/my_pass.py", "relax.py", "deepspeed/runtime/pipe/engine.py", "module.py")


def missing_in_sources(sources: Sources) -> list[str]:
    """List the files that docstrings and comments name and that are nowhere."""
    lines = []
    for source in sources.values():
        room = ROOT / "src" / source.room.replace(".", "/")
        folders = (ROOT, *(folder for folder in (room, *room.parents) if folder.is_relative_to(PACKAGE)))
        for line, text in (*source.docstrings(), *source.comments()):
            named = (*_FILE.findall(text), *_FOLDER.findall(text))
            lines += [
                f"{source.name}:{line} names {path}" for path in named if not any((f / path).exists() for f in folders)
            ]
    return lines


def missing_in_page(page: Path, text: str) -> list[str]:
    """List the files that a page names outside of its examples and that are nowhere."""
    made = {*_EXAMPLES, *re.findall(r'^```\w+ title="(.+)"$', text, re.MULTILINE)}
    named = (*_FILE.findall(FENCE.sub("", text)), *_FOLDER.findall(FENCE.sub("", text)))
    return [
        path
        for path in named
        if path not in made
        and not any((folder / path).exists() for folder in (page.parent, ROOT, PACKAGE))
        and ("/" in path or path not in _names())
    ]


@cache
def _names() -> set[str]:
    folders = ("ir", "frontends", "passes", "backends", "runtime", "src", "tests", "docs", "benchmarks", "examples")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}


def test_files_named_in_docstrings_exist() -> None:
    problems = missing_in_sources(product())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name != "reference"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_named_in_pages_exist(page: Path) -> None:
    assert not missing_in_page(page, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        '"""A graph (grafh.py)."""',
        '"""A graph (ir/grafh.py)."""',
        '"""A rule of search.py."""',
        "# in passes/nowhere/ alone",
        '"""A file of penstock/ir/graph.py."""',
    ],
)
def test_a_missing_file_is_noticed_in_a_docstring(text: str) -> None:
    """The controls: a wrong name, a wrong path, a file of another room, a missing folder, a wrong root."""
    assert missing_in_sources(made_up(ir__verify__new=text))


def test_right_files_are_left_alone() -> None:
    text = '"""Rules of graph.py, verify/runs.py, runs.py, ir/types.py, planning/plan.py and stages/sN/relax.py."""'
    assert not missing_in_sources(made_up(ir__verify__new=text))


def test_a_missing_file_is_noticed_in_a_page() -> None:
    text = "`graph.py`, `ir/graph.py`, ir.md and passes/planner/ are there; `grafh.py`, `ir/grafh.py`, `ir/nowhere/` not.\n"
    example = '```python title="mine.py"\nprint("yours.py")\n```\nRun mine.py, not other.py.\n'
    page = ROOT / "docs" / "index.md"
    assert missing_in_page(page, text) == ["grafh.py", "ir/grafh.py", "ir/nowhere/"]
    assert missing_in_page(page, example) == ["other.py"]
