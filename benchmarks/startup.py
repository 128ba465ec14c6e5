"""How long the command line takes to start: seconds of a fresh process from its start to its end, and the heavy libraries that it loads.

    python benchmarks/startup.py                  some seconds
    python benchmarks/startup.py --rounds 21 --json startup.json

Commands take turns with an interpreter that does nothing; figures are medians. `--help` is to take less than 0.4 s: exit code 1 where it does not, or where help
loads one of the heavy libraries.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Any

from looking import HEAVY, look
from machine import markdown, write_json
from turns import take_turns

LIMIT_S = 0.4
NOTHING = "python -c pass"
COMMANDS = (("--help",), ("compile", "--help"), ("run", "--help"), ("passes",))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="processes of each command (default: 11)")
    parser.add_argument("--json", metavar="FILE", help="write every time")
    arguments = parser.parse_args()
    names = {f"penstock {' '.join(words)}": words for words in COMMANDS}
    loaded = {name: look(words)[1] for name, words in names.items()}
    runs = {NOTHING: lambda: start("-c", "pass")} | {
        name: lambda words=words: start("-m", "penstock", *words) for name, words in names.items()
    }
    times = take_turns(runs, arguments.rounds)
    rows: list[dict[str, Any]] = [{"command": name, "seconds": found, "loaded": loaded.get(name, [])} for name, found in times.items()]
    print(markdown(*table_of(rows)))
    write_json(arguments.json, {"limit_s": LIMIT_S, "heavy": HEAVY, "rows": rows})
    helps = [row for row in rows if row["command"].endswith("--help")]
    return int(any(row["loaded"] or statistics.median(row["seconds"]) > LIMIT_S for row in helps))


def start(*words: str) -> None:
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, timeout=60, check=True)


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return ["command", "seconds", "heavy libraries loaded"], [
        [f"`{row['command']}`", f"{statistics.median(row['seconds']):.3f}", ", ".join(row["loaded"]) or "none"] for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
