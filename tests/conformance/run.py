"""Run ONNX's node tests against Penstock.

    python tests/conformance/run.py                                 all 1884 through the interpreter, and a summary
    python tests/conformance/run.py --through tvm --set plain       the 1208 through compiled modules
    python tests/conformance/run.py --only 'test_(conv|gemm)'       those whose name matches
    python tests/conformance/run.py --update                        write the list of what does not pass anew

Each case runs in a process of its own, with a limit of time and of memory: one that crashes or hangs is one that fails. `--json FILE` writes
every status and reason; `--by-operator FILE` the failing tests by the operator that they test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ["PENSTOCK_CACHE"] = "off"

from oracles.limits import ANSWERED, each

from conformance.cases import ALL, COUNTS, NUMERIC, PLAIN, Case, collect, members
from conformance.execution import EXECUTE, FAILED, FOLDED, INTERPRETER, KNOWN, PASSED, TVM, judged
from conformance.gaps import Result, changes, file_of, read_gaps, write_gaps

SECONDS = {INTERPRETER: 60.0, TVM: 600.0}
GROWTH = 4 << 30
# What is listed of each way: compiling takes a second for each case, so that expansions are left out.
LISTED = {INTERPRETER: NUMERIC, TVM: PLAIN}
# Where there is no terminal, a line after so many.
_TOLD = 100
# Loaded before processes are forked, so that each need not load it by itself; none of it starts threads.
_LOADED_FIRST = {
    INTERPRETER: ("penstock.frontends.onnx", "penstock.ir.interpreter.schedules"),
    TVM: (
        "penstock.api",
        "penstock.passes.pipelines",
        "penstock.backends.tvm.compile.build",
        "penstock.backends.tvm.run.load",
        "penstock.backends.tvm.compile.jobs",
        "penstock.runtime.state.store",
    ),
}


def run_cases(cases: Sequence[Case], way: str, jobs: int, seconds: float | None = None) -> dict[str, Result]:
    """Status and reason of each case, in order."""

    def work(case: Case) -> str:
        return json.dumps(judged(case, EXECUTE[way]))

    for module in _LOADED_FIRST[way]:
        import_module(module)
    found: dict[int, Result] = {}
    for index, outcome in each(work, cases, seconds=seconds or SECONDS[way], growth=GROWTH, jobs=jobs):
        if outcome.ended == ANSWERED:
            status, reason = json.loads(outcome.text)
            found[index] = (status, reason)
        else:
            found[index] = (
                FAILED,
                f"{outcome.ended}: {outcome.text.splitlines()[0][:140] if outcome.text else 'killed'}",
            )
        if sys.stderr.isatty():
            print(f"\r{len(found)}/{len(cases)} {cases[index].name:<80.80}", end="", file=sys.stderr)
        elif len(found) % _TOLD == 0:
            print(f"{len(found)}/{len(cases)}", file=sys.stderr, flush=True)
    return {cases[i].name: found[i] for i in range(len(cases))}


def summary(cases: Sequence[Case], results: Mapping[str, Result]) -> list[str]:
    lines = [f"{'set':<10}{'tests':>6}{'passed':>8}{'as given':>10}{'known':>7}{'folded':>8}{'failed':>8}"]
    for name in (ALL, NUMERIC, PLAIN):
        chosen = [case.name for case in cases if name in members(case)]
        count = Counter(results[case][0] for case in chosen)
        passed = len(chosen) - count[FAILED]
        lines.append(
            f"{name:<10}{len(chosen):>6}{passed:>8}{count[PASSED]:>10}{count[KNOWN]:>7}{count[FOLDED]:>8}{count[FAILED]:>8}"
        )
    reasons = Counter(reason for status, reason in results.values() if status == FAILED)
    return [*lines, "", *(f"{count:5}  {reason}" for reason, count in reasons.most_common())]


def by_operator(cases: Sequence[Case], results: Mapping[str, Result]) -> str:
    """Failing numeric tests by operator: an expansion counts for the operator that it expands."""
    plain = {case.name: case.model.graph.node[0].op_type for case in cases if "_expanded" not in case.name}
    rows: dict[str, list[str]] = {}
    for case in cases:
        status, reason = results[case.name]
        if status == FAILED and NUMERIC in members(case):
            operator = plain.get(case.name.split("_expanded")[0], "other expansions")
            rows.setdefault(operator, []).append(f"{case.name}: {reason}")
    ordered = sorted(rows.items(), key=lambda row: -len(row[1]))
    return "".join(
        f"{operator}: {len(tests)}\n" + "".join(f"    {test}\n" for test in tests) for operator, tests in ordered
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--through", choices=tuple(EXECUTE), default=INTERPRETER)
    parser.add_argument("--set", choices=tuple(COUNTS), help="which tests; all, or what is listed for tvm")
    parser.add_argument("--only", metavar="REGEX")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="the first of them, and every Nth after it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="limit for each test")
    parser.add_argument("--update", action="store_true", help="write the list of what does not pass")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--by-operator", metavar="FILE")
    given = parser.parse_args(words)
    way = given.through
    if given.update and (given.only or given.set or given.every > 1):
        parser.error("--update lists what a whole run says, without --only, --every and --set")
    wanted = given.set or (ALL if way == INTERPRETER else LISTED[way])
    cases = [c for c in collect() if wanted in members(c) and re.search(given.only or "", c.name)][:: given.every]
    began = time.monotonic()
    results = run_cases(cases, way, given.jobs, given.seconds)
    print(*summary(cases, results), f"{time.monotonic() - began:.0f} s", sep="\n")
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    if given.by_operator:
        Path(given.by_operator).write_text(by_operator(cases, results), encoding="utf-8")
    listed = {c.name: results[c.name] for c in cases if LISTED[way] in members(c)}
    if given.update:
        write_gaps(file_of(way), way, listed)
        return 0
    before = read_gaps(file_of(way))
    here = {
        name: result
        for name, result in before.items()
        if name in listed or not (given.only or given.set or given.every > 1)
    }
    differing = changes(here, listed)
    print("", *differing, f"{len(differing)} tests are not as listed in {file_of(way).name}", sep="\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
