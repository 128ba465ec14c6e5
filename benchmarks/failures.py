"""Failures at random moments: whether a run ends in time, says why, leaves nobody, and resumes exactly.

    python benchmarks/failures.py --trials 100 --json failures.json     # of all kinds, in random order
    python benchmarks/failures.py --trials 9 --kinds kill,stop,cut      # of some kinds
    python benchmarks/failures.py --soak 2000 --every 200               # a local run that loses workers, and its memory
    python benchmarks/failures.py --together 20                         # minutes of training and inference at once

A trial does one thing to a run of four ranks, and holds it to what docs/runtime.md promises: exit code, seconds until
the last process has ended, one line that says why. Then the run goes on, and its losses must be those of a run without
failure, bit for bit, each step once. failure_kinds.py has the kinds; kill, stop and cut need network namespaces (root,
iproute2), disk may mount. The exit code is 1 if any promise does not hold.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from failure_kinds import KINDS, NEEDS
from failure_runs import Place, Result, Shared, prepare
from failure_tables import table_of
from machine import processor, system, write_json
from soaks import soak, together

# Seconds that a busy machine may add to those that are promised.
SLACK = 8.0


def order_of(kinds: Sequence[str], count: int, chance: random.Random) -> list[str]:
    """Draw the kinds of trials: each once, in random order, before any comes again."""
    order: list[str] = []
    while len(order) < count:
        order += chance.sample(list(kinds), len(kinds))
    return order[:count]


def trials(
    count: int,
    seed: int,
    steps: int,
    heartbeat: float,
    recover: bool = True,
    kinds: Sequence[str] = tuple(KINDS),
    slack: float = SLACK,
) -> list[Result]:
    """Run trials of these kinds. Without `recover` no run is started again after it ended."""
    chance = random.Random(seed)
    results = []
    with tempfile.TemporaryDirectory(prefix="penstock-failures-") as root:
        shared = prepare(Path(root), steps, heartbeat, recover, slack, "packs" in kinds)
        for number, kind in enumerate(order_of(kinds, count, chance)):
            folder = Path(root) / f"trial{number}"
            folder.mkdir()
            results.append(trial(shared, folder, kind, random.Random(f"{seed} {number}")))
            print(f"{number + 1:3} {line_of(results[-1])}", flush=True)
    return results


def trial(shared: Shared, folder: Path, kind: str, chance: random.Random) -> Result:
    """Run one trial; what it left is killed."""
    place = Place(shared, folder)
    try:
        result = KINDS[kind](place, chance)
        result.problems += place.problems
        return result
    finally:
        place.clear()


def line_of(result: Result) -> str:
    ended = "went on by itself" if result.seconds is None else f"ended in {result.seconds:5.1f} s"
    outcome = "; ".join(result.problems) or "ok"
    what = f"{result.kind:11} {result.target:20} rank {result.rank} after step {result.after:4}"
    return f"{what}: {ended}, went on in {result.again_s:5.1f} s: {outcome}"


def chosen_kinds(text: str | None) -> tuple[list[str], list[str]]:
    """Return the kinds that are asked for and can be tried, and why others cannot."""
    kinds = list(KINDS) if text is None else text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise SystemExit(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    reasons = {kind: NEEDS[kind]() for kind in kinds if kind in NEEDS}
    missing = [f"{kind} cannot be tried here: {reason}" for kind, reason in reasons.items() if reason]
    return [kind for kind in kinds if not reasons.get(kind)], missing


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def run_trials(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run trials as the arguments say; return what goes into the file, and whether one failed."""
    kinds, missing = chosen_kinds(arguments.kinds)
    print("\n".join(missing), file=sys.stderr)
    if not kinds:
        raise SystemExit(2)
    results = trials(
        arguments.trials, arguments.seed, arguments.steps, arguments.heartbeat, kinds=kinds, slack=arguments.slack
    )
    failed = sum(bool(result.problems) for result in results)
    print(f"\n{table_of(results)}\n\n{len(results)} trials, {failed} failed")
    machine = {"processor": processor(range(1)), "system": system()}
    settings = {"seed": arguments.seed, "steps": arguments.steps, "heartbeat": arguments.heartbeat}
    document = {"machine": machine, "settings": settings, "failed": failed, "trials": [asdict(r) for r in results]}
    return document, failed > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--kinds", metavar="A,B", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--steps", type=int, default=400, help="of every trial")
    parser.add_argument("--heartbeat", type=float, default=10.0)
    parser.add_argument("--slack", type=float, default=SLACK, help="seconds that a busy machine may add")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=int, metavar="STEPS", help="instead of trials")
    parser.add_argument("--every", type=int, default=200, help="steps between two losses of --soak")
    parser.add_argument("--together", type=float, metavar="MINUTES", help="instead of trials")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    # Unwinds everything: processes, namespaces, folders.
    signal.signal(signal.SIGTERM, _end)
    if arguments.soak or arguments.together:
        result = (
            soak(arguments.soak, arguments.every, arguments.seed)
            if arguments.soak
            else together(arguments.together * 60, arguments.seed)
        )
        failed = bool(result["problems"])
    else:
        result, failed = run_trials(arguments)
    write_json(arguments.json, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
