"""The start-up times of commands and of jobs.

Commands: seconds of a fresh process from its start to its end, and the heavy libraries that it loads. Jobs: seconds
from `ps.open` until all ranks of a small model are ready, in a process of its own, the first time and the next, and the
processor seconds of all its processes meanwhile. A fork server is running the second time (runtime/launch/forkserver.py).

    python benchmarks/startup.py                  some seconds
    python benchmarks/startup.py --rounds 21 --json startup.json

Commands take turns with an interpreter that does nothing; figures are medians. `--help` must take less than 0.4 s: exit
code 1 where it does not, or where help loads one of the heavy libraries. `--limit` allows for a machine that does other
work meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from looking import HEAVY, look
from machine import markdown, write_json
from turns import in_turn, take_turns

LIMIT_S = 0.4
NOTHING = "python -c pass"
COMMANDS = (("--help",), ("compile", "--help"), ("run", "--help"), ("passes",))
TIMES = ("first", "next")
_MAKE = """
import sys
import penstock as ps
from penstock.models import write_mlp
folder, ranks = sys.argv[1], int(sys.argv[2])
model = ps.from_onnx(write_mlp(f"{folder}/model.onnx", [16] * 9, batch=4))
training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=4)
ps.compile(ps.plan(model, ps.Cluster.local(ranks), training), f"{folder}/{ranks}")
"""
_OPEN = """
import json, os, sys, time
from pathlib import Path
import penstock as ps

def family(pid):
    found = [pid]
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += family(child)
    except OSError:  # a rank of the last job, gone by now
        pass
    return found

def spent():
    total = 0
    for pid in family(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")

found = []
for _ in range(2):
    before, begin = spent(), time.perf_counter()
    with ps.open(sys.argv[1]):
        found.append([time.perf_counter() - begin, spent() - before])
print(json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="processes of each command (default: 11)")
    parser.add_argument(
        "--ranks", nargs="*", type=int, default=[1, 2, 4], metavar="N", help="jobs of so many ranks (default: 1 2 4)"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help=f"seconds of --help at most (default: {LIMIT_S})"
    )
    parser.add_argument("--json", metavar="FILE", help="write every time")
    arguments = parser.parse_args()
    names = {f"penstock {' '.join(words)}": words for words in COMMANDS}
    loaded = {name: look(words)[1] for name, words in names.items()}
    runs = {NOTHING: lambda: start("-c", "pass")} | {
        name: lambda words=words: start("-m", "penstock", *words) for name, words in names.items()
    }
    times = take_turns(runs, arguments.rounds)
    rows: list[dict[str, Any]] = [
        {"command": name, "seconds": seconds, "loaded": loaded.get(name, [])} for name, seconds in times.items()
    ]
    jobs = open_jobs(arguments.ranks, arguments.rounds)
    print(f"{markdown(*table_of(rows))}\n\n{markdown(*table_of_jobs(jobs))}")
    write_json(arguments.json, {"limit_s": arguments.limit, "heavy": HEAVY, "rows": rows, "jobs": jobs})
    helps = [row for row in rows if row["command"].endswith("--help")]
    return int(any(row["loaded"] or statistics.median(row["seconds"]) > arguments.limit for row in helps))


def start(*words: str) -> None:
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, timeout=60, check=True)


def open_jobs(numbers: list[int], rounds: int) -> list[dict[str, Any]]:
    """Open jobs of so many ranks, in turns."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        for ranks in numbers:
            start("-c", _MAKE, folder, str(ranks))
        times: dict[str, list[Any]] = {str(ranks): [] for ranks in numbers}
        for _, ranks in in_turn(list(times), rounds):
            command = [sys.executable, "-c", _OPEN, str(Path(folder) / ranks)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
            times[ranks].append(json.loads(done.stdout))
    return [
        {
            "ranks": int(ranks),
            "when": when,
            "seconds": [each[i][0] for each in opened],
            "processor": [each[i][1] for each in opened],
        }
        for ranks, opened in times.items()
        for i, when in enumerate(TIMES)
    ]


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return ["command", "seconds", "heavy libraries loaded"], [
        [f"`{row['command']}`", f"{statistics.median(row['seconds']):.3f}", ", ".join(row["loaded"]) or "none"]
        for row in rows
    ]


def table_of_jobs(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return ["ranks", "job of a process", "seconds until ready", "processor seconds"], [
        [
            str(row["ranks"]),
            row["when"],
            *(f"{statistics.median(row[clock]):.2f}" for clock in ("seconds", "processor")),
        ]
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
