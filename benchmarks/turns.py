"""Turns of contenders, one after the other, round after round, so that other work on the machine hits all alike.

`take_turns` is for contenders in one process. A contender that is a process of its own (`serve`) names the processes it
trains in, then sleeps on its standard input until the coordinator's order. Its protocol, one JSON object per line:
contender to coordinator, once it has warmed up, {"processes": {label: pid}, "about": {...}}; coordinator {"run":
STEPS}; answer {"losses": [...]}, one loss per optimiser step where the process knows them, after all work of the steps
is done. End of input ends the contender. All its other output goes to its standard error.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
# Threads that have finished a loop spin for a while, waiting for the next, on cores that the next contender needs:
# onnxruntime's, OpenMP's and TVM's alike.
PAUSE_S = 0.2


def in_turn(contenders: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield every contender once a round, the first one changing, with the number of the round.

    Each finds the threads of the one before asleep.
    """
    for number in range(rounds):
        shift = number % max(1, len(contenders))
        for contender in (*contenders[shift:], *contenders[:shift]):
            time.sleep(PAUSE_S)
            yield number, contender


def take_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return seconds of every turn of each, by the clock."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in in_turn(list(runs), rounds):
        begin = clock()
        runs[name]()
        times[name].append(clock() - begin)
        if all(len(each) == number + 1 for each in times.values()):
            said = ", ".join(f"{name} {statistics.median(each):.2f} s" for name, each in times.items())
            print(f"round {number + 1} of {rounds}: {said}", file=sys.stderr)
    return times


def serve(processes: dict[str, int], about: dict[str, object], run: Callable[[int], list[float]]) -> None:
    """Answer the coordinator until it hangs up."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the protocol
    print(json.dumps({"processes": processes, "about": about}), file=out, flush=True)
    for line in sys.stdin:
        steps = json.loads(line)["run"]
        print(json.dumps({"losses": run(steps)}), file=out, flush=True)
