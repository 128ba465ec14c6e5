"""The tree of tests: where its files lie, how many a folder has, and how long they are (docs/layout.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from .source_tree import PACKAGE, ROOT, product

MOST_FILES, MOST_LINES = 15, 500

# Folders of tests/ that are no rooms of the product: tests across rooms, and what tests share.
BESIDE_ROOMS = (
    *("acceptance", "benchmarks", "conformance", "fuzz", "gpu", "models", "mutation", "oracles", "project", "replay"),
    "samples",
)
# Folders beside a test that hold what it compares with.
DATA = ("goldens", "goldens_bf16", "goldens_zb", "walkthrough")


def misplaced_tests(files: Iterable[str]) -> list[str]:
    """List the folders below tests/ that are no rooms, and those with too many files. Paths start below tests/."""
    rooms = {source.room.removeprefix(PACKAGE).strip(".").replace(".", "/") for source in product().values()}
    folders = Counter(path.rpartition("/")[0] for path in files if not path.endswith("__init__.py"))
    modules = Counter(path.rpartition("/")[0] for path in files if path.endswith(".py"))
    lines = [f"tests/{folder} has {count} files" for folder, count in sorted(modules.items()) if count > MOST_FILES]
    for folder in sorted(folders):
        place = folder.rpartition("/")[0] if folder.rpartition("/")[2] in DATA else folder
        if place not in rooms and place.partition("/")[0] not in BESIDE_ROOMS:
            lines.append(f"tests/{folder} is the folder of no room")
    return lines


def _files_of_tests() -> list[str]:
    below = ROOT / "tests"
    found = (path for path in below.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [path.relative_to(below).as_posix() for path in found]


def test_tests_lie_as_the_product_does() -> None:
    problems = misplaced_tests(_files_of_tests())
    assert not problems, "\n".join(["docs/layout.md has the rules", *problems])


@pytest.mark.parametrize(
    "files",
    [["planner/test_chain.py"], ["passes/bisecting/breaking.py"], ["passes/golden/input.ir"]]
    + [[f"{folder}test_{number}.py" for number in range(16)] for folder in ("", "passes/planner/", "oracles/")],
    ids=lambda files: files[0],
)
def test_a_misplaced_test_is_noticed(files: list[str]) -> None:
    """The controls."""
    assert len(misplaced_tests(files)) == 1
    assert not misplaced_tests(["conftest.py", "passes/planner/test_chain.py", "passes/goldens/input.ir"])


def long_tests(texts: Mapping[str, str]) -> list[str]:
    return [f"{name} has {count} lines" for name, text in texts.items() if (count := text.count("\n")) > MOST_LINES]


def test_files_of_tests_are_short() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert len(texts) > 100
    assert not long_tests(texts)


def test_control_a_long_file_is_noticed() -> None:
    assert long_tests({"short": "x\n" * MOST_LINES, "long": "x\n" * (MOST_LINES + 1)}) == ["long has 501 lines"]
