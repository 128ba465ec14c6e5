"""Files of tests have at most 500 lines (docs/layout.md)."""

from __future__ import annotations

from collections.abc import Mapping

from oracles.repository import ROOT

MOST_LINES = 500


def long_tests(texts: Mapping[str, str]) -> list[str]:
    return [f"{name} has {count} lines" for name, text in texts.items() if (count := text.count("\n")) > MOST_LINES]


def test_files_of_tests_are_short() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert len(texts) > 100
    assert not long_tests(texts)


def test_control_a_long_file_is_noticed() -> None:
    assert long_tests({"short": "x\n" * MOST_LINES, "long": "x\n" * (MOST_LINES + 1)}) == ["long has 501 lines"]
