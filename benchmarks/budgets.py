"""A training under budgets of memory, each with the plan that `--offload auto` chooses, under a limit of the kernel.

    python benchmarks/budgets.py --out DIR --json budgets.json                 20 budgets: about 20 minutes
    python benchmarks/budgets.py --out DIR --width 64 --layers 5 --vocab 64 --budgets 3 --turns 1 --json x.json

A GPT is trained with AdamW on one device of one thread, under gpipe. Budgets lie evenly from the least that any plan
needs to what the plan that keeps everything needs. Each plan runs in a memory cgroup whose limit is its budget and
what a run of a tiny model takes there, with the kernel's memory for it. The process that starts the run is in it,
too. The kernel ends what takes more.

Predictions are those of the simulator, with times that do not come from these runs. The plan that keeps everything is
rehearsed by itself ahead of each budget: seconds of its forward, backward and update over their estimates correct the
estimates of the plan. The bandwidth of the disk is measured in turns with the steps, by code of its own: one thread
reads a file, and another writes one. Plans are chosen by rates of the machine and a bandwidth that were measured before.

A plan takes turns with the one that keeps everything and the one that recomputes everything, both without a limit. A
turn is a run of so many steps, of which the first and the last do not count. A machine may change its speed from second
to second. So the prediction of a turn goes by how long the plan that keeps everything takes ahead of it and behind it,
over what it took around its rehearsal. Ratios are medians of those of turns.

Exit code 1 where a plan is ended, or losses are no numbers. The goals of the other figures are in the table: a step
within 15 % of its prediction, and none slower than where everything is recomputed.

It goes on where DIR has rows of the same arguments: each row is written when it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from elsewhere import Way
from machine import load, markdown, processor, system, versions, write_json
from memory_group import CGROUPS, MemoryGroup, enter, held_in

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.calibration.rehearse import rehearse
from penstock.doctor.local import measured_cluster
from penstock.doctor.ways import with_measured_way
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.memory.predict import measure_memory
from penstock.models import write_gpt
from penstock.passes.costs.prices import rank_seconds
from penstock.planning.predict import predict_timed
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec
from penstock.support.errors import DoesNotFit

MIB = 1 << 20
# The bytes that a measurement of the disk moves in each direction.
MOVED = 64 * MIB
# The steps of a turn, the first and the last of which do not count. The seconds that a turn may take.
STEPS, LONGEST = 6, 300
# How far a step may be from its prediction.
WITHIN = 0.15
SIZES = {"width": 320, "layers": 5, "vocab": 1024, "positions": 32, "samples": 2, "microbatches": 6, "budgets": 20}


class Contender:
    """A training in a process of its own, in a memory group if one is given: it runs a turn whenever it is asked."""

    def __init__(self, bundle: Path, group: MemoryGroup | None = None) -> None:
        command = [sys.executable, __file__, "--train", str(bundle), *(["--group", str(group.path)] if group else [])]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def turn(self) -> dict[str, Any] | None:
        """Return seconds of steps, losses, and the memory of the group; None where the training was ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        limit = threading.Timer(LONGEST, self.process.kill)
        limit.start()
        try:
            print(file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def step(self) -> float:
        """Return the seconds of a step of a turn, of a training that has no limit."""
        answer = self.turn()
        assert answer is not None, "a training without a limit was ended"
        return statistics.median(answer["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of a training that was ended
            self.process.stdin.close()
        try:
            self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.seek(0)
        if self.process.returncode:
            print((self.errors.read().strip().splitlines() or ["ended without a word"])[-1], file=sys.stderr)
        self.errors.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Turn(NamedTuple):
    """What a plan under its limit answered, and the seconds that others took beside it: a step of the plan that keeps
    everything, the disk, and a step of the plan that recomputes everything."""

    own: dict[str, Any]
    kept: float
    way: float
    everything: float

    @property
    def step(self) -> float:
        """The seconds of a step of the plan."""
        return statistics.median(self.own["seconds"])


def train(bundle: str, group: str | None) -> None:
    """Run a turn for each line that comes."""
    if group:
        enter(group)
    with Job(open_bundle(Path(bundle)), timeout=LONGEST, data=DataSpec()) as job:
        for _ in sys.stdin:
            steps = list(job.steps_from_data(STEPS))
            seconds = [after.at - before.at for before, after in pairwise(steps[:-1])]
            answer: dict[str, Any] = {"seconds": seconds, "losses": [step.loss for step in steps]}
            if group:
                answer["resident"] = held_in(group)
            print(json.dumps(answer), flush=True)


class Budgets:
    """The model, its device, and the plans under budgets."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.out = arguments, Path(arguments.out).resolve()
        ranks = measured_cluster(Cluster.local(2, threads=(1, 1)), print)
        space = Space("disk", path=f"{self.out}/")
        self.cluster = with_measured_way(replace(ranks, devices=ranks.devices[:1], links=()), space, print)
        self.way = Way(self.out, MOVED, MOVED)

    def plan(self, nbytes: int, width: int = 0, **settings: str) -> ps.Plan:
        """Plan for a device of so many bytes, without a limit if 0."""
        arguments, small = self.arguments, bool(width)
        width = width or arguments.width
        model = write_gpt(
            self.out / f"gpt-{width}.onnx", layers=arguments.layers, width=width, heads=4, vocab=64 if small else arguments.vocab,
            positions=16 if small else arguments.positions, batch=1 if small else arguments.samples,
        )  # fmt: skip
        training = ps.Training(
            loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=2 if small else arguments.microbatches
        )
        spaces = (("ram", nbytes),) if nbytes else ()
        cluster = replace(self.cluster, devices=(replace(self.cluster.devices[0], spaces=spaces),))
        return ps.plan(ps.from_onnx(model), cluster, training, schedule="gpipe", **settings)

    def bundle(self, name: str, width: int = 0, **settings: str) -> Path:
        """Return the bundle of a plan without a limit."""
        path = self.out / name
        return path if path.exists() else ps.compile(self.plan(0, width, **settings), path)

    def listed(self) -> list[int]:
        """Return the budgets: from the least that any plan needs to what the plan that keeps everything needs."""
        try:
            self.plan(MIB, offload="auto")
            raise AssertionError("a plan for 1 MiB")
        except DoesNotFit as error:
            (least,) = error.needs.values()
        most, count = peak_of(self.plan(0, recompute="none")), self.arguments.budgets
        return [least + (most - least) * i // (count - 1) for i in range(count)]

    def row(self, number: int, nbytes: int) -> dict[str, Any]:
        """Plan and compile for a budget."""
        plan = self.plan(nbytes, offload="auto")
        assert plan.prices is not None
        assert plan.prices.chosen is not None
        chosen, name = plan.prices.chosen, f"budget-{number}"
        if not (self.out / name).exists():
            ps.compile(plan, self.out / name)
        return {
            "budget": nbytes,
            "bundle": name,
            "does": chosen.words,
            "offload": chosen.offload,
            "recompute": chosen.recompute,
            "price": (chosen.step or math.nan) / plan.prices.seconds_free - 1,
            "planned": peak_of(plan),
        }

    def corrections(self) -> dict[str, float]:
        """Return measured over estimated seconds of each kind of computation of the plan that keeps everything."""
        kept = open_bundle(self.out / "kept")
        (row,) = rehearse(kept, [0], seconds=1.0)
        return {kind: row[kind] / seconds for (_, kind), seconds in rank_seconds(kept.module).items() if kind in row}

    def predicted(self, name: str, corrections: Mapping[str, float], bandwidth: float) -> float:
        """Predict the seconds of a step. What is made again takes as long as forwards do."""
        module = open_bundle(self.out / name).module
        assert module.cluster is not None
        spaces = tuple(replace(space, bandwidth=bandwidth) for space in module.cluster.spaces)
        module = module.but(cluster=replace(module.cluster, spaces=spaces))
        row = {
            kind: seconds * corrections.get(kind, corrections["F"])
            for (_, kind), seconds in rank_seconds(module).items()
        }
        return predict_timed(module, [row]).step

    def measured(self, row: Mapping[str, Any], base: int, kept: Contender, everything: Contender) -> dict[str, Any]:
        """Run a plan under its limit, in turns with the plan that keeps everything, the one that recomputes everything,
        and the disk."""
        around = [kept.step()]
        corrections = self.corrections()
        around.append(kept.step())
        group = MemoryGroup(row["bundle"], base + row["budget"])
        mine = Contender(self.out / row["bundle"], group)
        mine.turn()  # warms up
        turns: list[Turn] = []
        ended = False
        while len(turns) < self.arguments.turns and not ended:
            before, moved, own = kept.step(), self.way.seconds(), mine.turn()
            ended = own is None
            if own is not None:
                turns.append(Turn(own, (before + kept.step()) / 2, moved, everything.step()))
        mine.close()
        kills = group.kills
        group.close()
        speeds = [turn.kept / statistics.mean(around) for turn in turns]
        predictions = [
            self.predicted(row["bundle"], {k: x * speed for k, x in corrections.items()}, MOVED / turn.way)
            for speed, turn in zip(speeds, turns, strict=True)
        ]
        return {
            "kills": kills,
            "finished": bool(turns) and not ended and all(map(math.isfinite, turns[-1].own["losses"])),
            "way bytes per second": MOVED / median(turn.way for turn in turns),
            "predicted": median(predictions),
            "corrections": corrections,
            "speeds": speeds,
            "step": median(turn.step for turn in turns),
            "predicted / step": median(p / turn.step for p, turn in zip(predictions, turns, strict=True)),
            "predicted / step in turns": [p / turn.step for p, turn in zip(predictions, turns, strict=True)],
            "steps": [turn.own["seconds"] for turn in turns],
            "ways": [turn.way for turn in turns],
            "everything again": median(turn.everything for turn in turns),
            "step / everything again": median(turn.step / turn.everything for turn in turns),
            "resident": max((turn.own["resident"] for turn in turns), default=0) - base,
        }


def median(values: Iterable[float]) -> float:
    """Return the median, or no number of nothing."""
    return statistics.median([*values] or [math.nan])


def peak_of(plan: ps.Plan) -> int:
    return max(row.peak for row in measure_memory(plan.module).values())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan, compile and run what DIR has no rows of; each part is kept when it is there."""
    kept_in = Path(arguments.out) / "rows.json"
    budgets = Budgets(arguments)
    state: dict[str, Any] = json.loads(kept_in.read_text()) if kept_in.exists() else {"rows": []}

    def keep() -> None:
        kept_in.write_text(json.dumps(state))

    if "budgets" not in state:
        state["budgets"] = budgets.listed()
    budgets.bundle("kept", recompute="none")
    budgets.bundle("all", recompute="all")
    tiny = budgets.bundle("tiny", 64, recompute="none")
    for number, nbytes in enumerate(state["budgets"]):
        if number >= len(state["rows"]):
            state["rows"].append(budgets.row(number, nbytes))
            keep()
    if arguments.only_plans:
        return state
    group = MemoryGroup("tiny")
    contender = Contender(tiny, group)
    answer = contender.turn()
    contender.close()
    group.close()
    assert answer is not None, "the run of the tiny model failed"
    state["base"] = answer["resident"]
    (held,) = measure_memory(open_bundle(budgets.out / "all").module).values()
    kept, everything = Contender(budgets.out / "kept"), Contender(budgets.out / "all")
    kept.turn()
    everything.turn()
    for row in state["rows"]:
        row["everything again fits"] = held.peak <= row["budget"]
        if "step" not in row:
            row |= budgets.measured(row, state["base"], kept, everything)
            print(
                f"{row['budget'] / MIB:.1f} MiB by {row['does']}: {row['step']:.3f} s, predicted {row['predicted']:.3f}"
            )
            keep()
    kept.close()
    everything.close()
    return state


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of budgets: what is chosen, predicted and measured."""
    head = [
        "budget", "fits by", "price", "MiB used", "predicted s", "measured s", "predicted / measured",
        "of everything recomputed", "under the limit",
    ]  # fmt: skip
    listed = [
        [
            f"{row['budget'] / MIB:.0f} MiB",
            row["does"],
            f"{row['price']:+.1%}",
            f"{row['resident'] / MIB:.0f}",
            f"{row['predicted']:.3f}",
            f"{row['step']:.3f}",
            f"{row['predicted / step']:.2f}",
            f"{row['step / everything again']:.2f}" if row["everything again fits"] else "does not fit",
            "finished" if row["finished"] and not row["kills"] else "ENDED",
        ]
        for row in rows
    ]
    return head, listed


def table_of_verdict(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return how many budgets reach each goal."""
    finished = sum(row["finished"] and not row["kills"] for row in rows)
    near = sum(abs(row["predicted / step"] - 1) <= WITHIN for row in rows)
    beside = [row["step / everything again"] for row in rows if row["everything again fits"]]
    worst = max((row["predicted / step"] for row in rows), key=lambda ratio: abs(math.log(ratio)))
    listed = [
        ["the plan finishes under its limit", f"{finished} of {len(rows)}", ""],
        ["the step is within 15 % of its prediction", f"{near} of {len(rows)}", f"worst: predicted / measured {worst:.2f}"],
        [
            "the step is not longer than with everything recomputed, where that fits",
            f"{sum(ratio <= 1 for ratio in beside)} of {len(beside)}",
            f"longest: {max(beside, default=math.nan):.2f} of it",
        ],
    ]  # fmt: skip
    return ["goal", "reached by", ""], listed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="a folder on the disk that is measured (default: one for temporary files)")
    for name, value in {**SIZES, "turns": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only-plans", action="store_true", help="plan and compile, and run nothing")
    parser.add_argument("--json", help="write the figures here, too")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.group)
        return 0
    if arguments.budgets < 2:
        parser.error("--budgets has to be 2 or more")
    if not os.access(CGROUPS, os.W_OK):
        parser.error(f"{CGROUPS} is no place for memory cgroups of version 1")
    with tempfile.TemporaryDirectory() as folder:
        arguments.out = arguments.out or folder
        state = measure(arguments)
    if arguments.only_plans:
        return 0
    cores = sorted(os.sched_getaffinity(0))
    machine = [processor(cores), system(), versions("torch", "numpy"), f"load {load()}"]
    print("; ".join(machine))
    for table in (table_of, table_of_verdict):
        print(markdown(*table(state["rows"])) + "\n")
    if arguments.json:
        kept = {name: value for name, value in vars(arguments).items() if name in SIZES}
        write_json(
            arguments.json, {"arguments": kept, "machine": machine, "base": state["base"], "rows": state["rows"]}
        )
    return 0 if all(row["finished"] and not row["kills"] for row in state["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
