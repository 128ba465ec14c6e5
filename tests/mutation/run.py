"""Change the verifier and the schedules in small ways, and see whether tests notice.

    python tests/mutation/run.py graphs                     all mutants of a part: graphs, programs or schedules
    python tests/mutation/run.py graphs --sample 100        so many of them, evenly drawn
    python tests/mutation/run.py graphs --only '_check_owners'    those whose file and name match; prints who killed each
    python tests/mutation/run.py graphs --seconds 240       so far in that time; the same command goes on where this one ended

Verdicts are kept in build/mutation/ (kept.py); once every mutant of a part has one, results.json is written anew for its files.

mutants.py says what is changed, trial.py how it is tried. A survivor is listed in equivalent.txt, with a reason, if no test could tell it from the
original, and only tried if --only names it; every other one is something that tests do not notice.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ["PENSTOCK_CACHE"] = "off"

from mutation.kept import Kept
from mutation.mutants import Mutant, mutants
from mutation.results import table, write_results
from mutation.trial import KILLED, ROOT, SURVIVED, Target, Tests, Verdict, preload, try_mutants

_VERIFY, _PASSES, _SCHEDULES = "ir/verify/{}.py", "tests/passes/{}.py", "passes/schedules/{}.py"


@dataclass(frozen=True)
class Part:
    """Files whose mutants are tried with the same tests: the quick ones of `tests`, without those whose names contain one of `without`: laws that
    take longer than what a mutant is tried with."""

    targets: tuple[Target, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()


def _files(pattern: str, *names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names)


PARTS = {
    "graphs": Part(
        tuple(map(Target, _files(_VERIFY, "verifier", "stages", "agreement"))),
        ("tests/ir/verify/test_verifier.py", "tests/ir/verify/test_agreement.py", "tests/ir/verify/test_moving.py"),
    ),
    "programs": Part(
        tuple(map(Target, _files(_VERIFY, "schedules", "runs", "versions", "messages", "ranks"))),
        (
            "tests/ir/verify/test_schedules.py",
            "tests/ir/verify/test_moving.py",
            *_files(_PASSES, "communicate/test_communicate", "memory/test_lifetimes"),
            *_files(_PASSES, "schedules/test_weight_versions", "schedules/test_mutants", "schedules/test_dealing"),
        ),
    ),
    "schedules": Part(
        tuple(
            map(
                Target,
                (
                    "ir/grid.py",
                    *_files(
                        _SCHEDULES, "schedule", "dealing", "delayed_2bw", "eager_2bw", "flush_1f1b", "forward", "gpipe"
                    ),
                    *_files(_SCHEDULES, "kind", "zero_bubble"),
                ),
            )
        ),
        (
            "tests/ir/test_grid.py",
            *_files(_PASSES, "schedules/test_schedule", "schedules/test_dealing", "schedules/test_kind"),
        ),
        ("formulas", "every_legal", "brute_force", "nobody_waits", "ranks_compute"),
    ),
}
EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def chosen(part: Part, only: str = "", sample: int = 0) -> dict[Target, list[Mutant]]:
    """Mutants by file: all, those that match, or a sample that depends on their names alone."""
    found = {target: list(mutants(Path(target.file).read_text(encoding="utf-8"))) for target in part.targets}
    if only:
        found = {target: [m for m in ms if re.search(only, f"{target.path} {m.name}")] for target, ms in found.items()}
    if sample:
        drawn = sorted(hashlib.sha256(f"{t.path} {m.name}".encode()).digest() for t, ms in found.items() for m in ms)[
            :sample
        ]
        least = drawn[-1]
        found = {
            t: [m for m in ms if hashlib.sha256(f"{t.path} {m.name}".encode()).digest() <= least]
            for t, ms in found.items()
        }
    return found


def read_equivalent() -> dict[tuple[str, str], str]:
    """The reason by file and name. A file's name stands alone on a line; below it each mutant, and below that, further in, the reason."""
    found: dict[tuple[str, str], str] = {}
    path = name = ""
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if not text or line.startswith("#"):
            continue
        match len(line) - len(line.lstrip()):
            case 0:
                path = text
            case 4:
                name = text
            case _:
                found[path, name] = f"{found.get((path, name), '')} {text}".strip()
    return found


def summary(verdicts: Iterable[Verdict], equivalent: Mapping[tuple[str, str], str]) -> dict[str, dict[str, object]]:
    """By file: how many mutants there are, were killed, are equivalent, and which survived besides."""
    by_target: dict[Target, list[Verdict]] = {}
    for verdict in verdicts:
        by_target.setdefault(verdict.target, []).append(verdict)
    return {
        target.path: {
            "mutants": len(by_target[target]),
            "killed": sum(v.ended == KILLED for v in by_target[target]),
            "equivalent": sum(
                v.ended != KILLED and (target.path, v.mutant.name) in equivalent for v in by_target[target]
            ),
            "survived": sorted(
                f"line {v.mutant.line} {v.mutant.name}" + ("" if v.ended == "survived" else f" ({v.ended})")
                for v in by_target[target]
                if v.ended != KILLED and (target.path, v.mutant.name) not in equivalent
            ),
        }
        for target in by_target
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--sample", metavar="N", type=int, default=0)
    parser.add_argument(
        "--budget", metavar="S", type=float, default=6.0, help="seconds of tests that a mutant is tried with (6)"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1)
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=float("inf"), help="begin with no mutant later than this"
    )
    given = parser.parse_args(words)
    part = PARTS[given.part]
    began, equivalent = time.monotonic(), read_equivalent()
    wanted = chosen(part, given.only, given.sample)
    kept = Kept(ROOT / "build" / "mutation" / f"{given.part}.jsonl", part.tests, given.budget)
    if not any(wanted.values()):
        parser.error(f"--only {given.only!r} matches no mutant of {given.part}")
    verdicts: list[Verdict] = []
    left: dict[Target, list[Mutant]] = {}
    for target, found in wanted.items():
        for mutant in found:
            known = None if given.only else kept.find(target, mutant)
            if not given.only and (target.path, mutant.name) in equivalent:
                known = Verdict(target, mutant, SURVIVED)
            if known is not None:
                verdicts.append(known)
            else:
                left.setdefault(target, []).append(mutant)
    earlier = len(verdicts)

    def tell(verdict: Verdict) -> None:
        verdicts.append(verdict)
        kept.add(verdict)
        if given.only or (verdict.ended != KILLED and (verdict.target.path, verdict.mutant.name) not in equivalent):
            place = f"{verdict.target.path}:{verdict.mutant.line}"
            print(
                f"{place} {verdict.mutant.name}: {verdict.ended}{f' by {verdict.by}' if verdict.by else ''}", flush=True
            )

    if left:
        preload()
        tests = Tests(part.tests, " and ".join(f"not {name}" for name in part.without))
        try_mutants(left, tests, given.budget, given.jobs, tell, lambda: time.monotonic() - began > given.seconds)
    print(*table(summary(verdicts, equivalent)), sep="\n")
    print(
        f"{len(verdicts) - earlier} mutants in {time.monotonic() - began:.0f} s with {given.jobs} at a time, {earlier} earlier"
    )
    if given.only or given.sample:
        return 0
    unknown = sum(map(len, wanted.values())) - len(verdicts)
    if unknown:
        print(f"{unknown} to go: the same command goes on with them")
        return 0
    names = {(t.path, m.name) for t, ms in wanted.items() for m in ms}
    for path, name in equivalent.keys() - names:
        if path in {t.path for t in part.targets}:
            print(f"equivalent.txt: {path} has no mutant {name}")
    write_results(summary(verdicts, equivalent), [target.path for part in PARTS.values() for target in part.targets])
    return 0


if __name__ == "__main__":
    sys.exit(main())
