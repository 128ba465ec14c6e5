"""The lists of failing tests: one file per way of execution, grouped by status and reason.

A file has lines `## STATUS: REASON`, each followed by the names of its tests; lines that begin with one `#` are comments. A test that is in no
group passes. Lists may only shrink, which `changes` says in words: it names everything that is not as listed, better or worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .execution import FAILED, FOLDED, KNOWN, PASSED

HERE = Path(__file__).resolve().parent
HEADER = """\
# Node tests of onnx.backend.test that do not pass as they are, by reason. Written by `python tests/conformance/run.py --through {way} --update`.
# failed: does not pass. known: passes when the inputs named are known at import. folded: passes with all inputs known, computed at import.
"""
Result = tuple[str, str]
_RANK = {PASSED: 0, KNOWN: 1, FOLDED: 2, FAILED: 3}


def file_of(way: str) -> Path:
    return HERE / f"known_gaps_{way}.txt"


def read_gaps(path: Path) -> dict[str, Result]:
    """Status and reason of every test listed."""
    found: dict[str, Result] = {}
    group: Result | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            status, _, reason = line[3:].partition(": ")
            group = (status, reason)
        elif line and not line.startswith("#"):
            assert group is not None, f"{path}: {line} is in no group"
            assert line not in found, f"{path}: {line} is listed twice"
            found[line] = group
    return found


def write_gaps(path: Path, way: str, results: Mapping[str, Result]) -> None:
    groups: dict[Result, list[str]] = {}
    for name, (status, reason) in results.items():
        if status != PASSED:
            groups.setdefault((status, reason), []).append(name)
    lines = [HEADER.format(way=way)]
    for (status, reason), names in sorted(groups.items(), key=lambda row: (-_RANK[row[0][0]], row[0][1])):
        lines += [f"## {status}: {reason}", *sorted(names), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def changes(listed: Mapping[str, Result], found: Mapping[str, Result]) -> list[str]:
    """Every test whose status is not the one listed. Reasons may change."""
    said = []
    for name, (status, reason) in found.items():
        before = listed.get(name, (PASSED, ""))[0]
        if _RANK[status] > _RANK[before]:
            said.append(f"{name}: listed as {before}, but {status}: {reason}")
        elif _RANK[status] < _RANK[before]:
            said.append(f"{name}: listed as {before}, but {status}; take it from the list: run.py --update")
    said += [f"{name}: is listed, but there is no such test" for name in listed if name not in found]
    return said
