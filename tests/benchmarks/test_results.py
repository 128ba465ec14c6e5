"""The runner of all benchmarks keeps what sections find, and says which of them failed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from oracles.repository import BENCHMARKS

BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import run

run.SECTIONS["planner"] = run.Section("no_such_script.py", "", "", "")
sys.exit(run.main())
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)


def test_sections_are_run_and_told(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    done = run(BENCHMARKS / "run.py", "--scale", "tiny", "--sections", "planner", "--json", out, "--markdown", page)
    assert done.returncode == 0, done.stderr
    # A second run adds its section to the file of the first.
    done = run(BENCHMARKS / "run.py", "--scale", "tiny", "--sections", "startup", "--json", out, "--markdown", page)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert list(result["sections"]) == ["startup", "planner"]
    assert {"processor", "system", "versions"} == set(result["machine"])
    assert all(section["exit"] == 0 and section["seconds"] > 0 for section in result["sections"].values())
    text = page.read_text()
    assert "| 8 | 2bw |" in text
    assert "`penstock --help`" in text
    assert "Not measured in this run." in text


def test_a_section_that_fails_is_shown(tmp_path: Path) -> None:
    """The control: the run goes on, says so and ends with 1."""
    script, out = tmp_path / "broken.py", tmp_path / "out.json"
    script.write_text(BROKEN.format(folder=str(BENCHMARKS)))
    done = run(script, "--scale", "tiny", "--sections", "planner", "startup", "--json", out)
    assert done.returncode == 1
    sections = json.loads(out.read_text())["sections"]
    assert (sections["planner"]["exit"], sections["startup"]["exit"]) == (2, 0)
    assert "Failed with exit code 2" in done.stdout
    assert "no_such_script.py" in done.stdout


# ------------------------------------------------------------------------------------------------ the committed run


def unexplained(result: dict[str, Any], text: str) -> list[str]:
    """What the page of results lacks: a cause for every goal that was missed, `* **NAME**: ...`, and no cause for one that was reached."""
    sys.path.append(str(BENCHMARKS))
    from goals import goals

    causes = re.findall(r"^\* \*\*(.+?)\*\*: \S", text, re.MULTILINE)
    missed = [goal.name for goal in goals(result) if not goal.reached]
    return sorted(set(missed) ^ set(causes))


def test_the_committed_run_is_whole_and_its_misses_are_explained() -> None:
    result = json.loads((BENCHMARKS / "results" / "full.json").read_text())
    text = (BENCHMARKS.parent / "docs" / "results.md").read_text()
    sys.path.append(str(BENCHMARKS))
    from page import PARTS

    assert result["scale"] == "full"
    assert {*result["sections"], "machine", "goals"} == set(PARTS)
    assert not [name for name, section in result["sections"].items() if section["exit"]]
    assert unexplained(result, text) == []


def test_control_a_missing_cause_is_seen() -> None:
    result = json.loads((BENCHMARKS / "results" / "full.json").read_text())
    text = (BENCHMARKS.parent / "docs" / "results.md").read_text()
    del result["sections"]["startup"]
    assert unexplained(result, text) == ["start-up"]
    assert unexplained(result, text + "\n* **start-up**: it was not measured\n") == []
    assert unexplained(result, text + "\n* **start-up**: it was not measured\n* **nothing**: a cause\n") == ["nothing"]
