"""The results of the last whole run of each part by file: the numbers of mutants, of killed and of equivalent ones, and
the survivors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


def read_results() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def write_results(found: Mapping[str, Mapping[str, object]], order: Sequence[str]) -> None:
    """Rows of these files; those of others stay. `order` has all files."""
    rows = {**read_results(), **found}
    RESULTS.write_text(
        json.dumps({path: rows[path] for path in order if path in rows}, indent=1) + "\n", encoding="utf-8"
    )


def table(results: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| file | mutants | killed | equivalent | survived | killed of those that differ |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    rows = {
        path: [row["mutants"], row["killed"], row["equivalent"], len(row["survived"])] for path, row in results.items()
    }  # type: ignore[arg-type]
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]  # type: ignore[arg-type]
    for path, (count, killed, same, survived) in rows.items():  # type: ignore[misc]
        share = killed / (count - same) if count > same else 1.0  # type: ignore[operator]
        yield f"| {path} | {count} | {killed} | {same} | {survived} | {share:.1%} |"
