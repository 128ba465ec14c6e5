"""The runs of held_back.py: jobs on one host in turns, and runs on hosts one after the other, within quotas.

In: bundles by name. Out: seconds of steps of each, and peaks of memory of the chosen one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from held_back_clusters import Drawn, group_of
from namespaces import Hosts
from truth_runs import FED, batches, beyond_base

from penstock.backends.bundle.format import Bundle
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec

ROUNDS, STEPS, WARM = 3, 3, 2
# A plan is out after a round in which its steps take this many times those of the quickest; after the steps that warm
# it up, which touch new memory, if the last of them takes so many times that of the quickest.
OUT, OUT_WARM = 1.2, 1.5
_SECONDS, _BREATH = 240.0, 0.05


class Contest:
    """What runs of a cell share: the cluster, samples of a batch, a folder; and the peaks that were found. Plans to
    `keep` run all rounds."""

    def __init__(self, drawn: Drawn, samples: int, folder: Path, keep: Collection[str]) -> None:
        self.drawn, self.samples, self.folder, self.keep = drawn, samples, folder, keep
        self.peaks: list[int] = []

    def goes_on(self, name: str, times: Mapping[str, list[float]], out: float = OUT) -> bool:
        """Return whether a plan may still be the quickest, or is one to keep."""
        quickest = min(statistics.median(seconds) for seconds in times.values() if seconds)
        return name in self.keep or statistics.median(times[name]) <= out * quickest


def take_turns(bundles: Mapping[str, Bundle], contest: Contest) -> dict[str, list[float]]:
    """Run all bundles on this host, in turns of some steps, without those that are out. A batch's time is that from
    the end of the one before."""
    drawn = contest.drawn
    times: dict[str, list[float]] = {name: [] for name in bundles}
    with ExitStack() as stack:
        groups = {n: stack.enter_context(group_of(n, drawn.quota(n))) for n in drawn.names}
        jobs = {}
        for name, bundle in bundles.items():
            data = DataSpec(str(_data(bundle, contest, name)))
            jobs[name] = stack.enter_context(Job(bundle, timeout=_SECONDS, data=data))
            _place(jobs[name], groups)
        warm = {name: _steps(job, 1 + WARM)[-1:] for name, job in jobs.items()}
        jobs = {name: job for name, job in jobs.items() if contest.goes_on(name, warm, OUT_WARM)}
        times |= {name: seconds for name, seconds in warm.items() if name not in jobs}
        for _ in range(ROUNDS):
            for name, job in jobs.items():
                times[name] += _steps(job, STEPS)
            jobs = {name: job for name, job in jobs.items() if contest.goes_on(name, times)}
        # Batches that are sent wait at the workers, as plans count them.
        chosen = bundles[next(iter(bundles))]
        with Job(chosen, timeout=_SECONDS) as job:
            list(job.run(batches(chosen.module, FED)))
            contest.peaks = beyond_base(job)
    return times


def _steps(job: Job, count: int) -> list[float]:
    """Run so many batches, and return the seconds of those that began behind another one, as in a long run."""
    return [b - a for a, b in pairwise(step.at for step in job.steps_from_data(count))]


def run_on_hosts(bundles: Mapping[str, Bundle], contest: Contest) -> dict[str, list[float]]:
    """Run one bundle after the other, with a rank on each host, and cards of the drawn rate."""
    drawn = contest.drawn
    with ExitStack() as stack:
        groups = {n: stack.enter_context(group_of(n, drawn.quota(n))) for n in drawn.names}
        hosts = stack.enter_context(Hosts(drawn.names))
        hosts.shape(drawn.rate)
        times: dict[str, list[float]] = {}
        for name, bundle in bundles.items():
            with closing(_on_hosts(hosts, bundle, groups, contest, name)) as rounds:
                for seconds in rounds:
                    times[name] = seconds
                    if not contest.goes_on(name, times):
                        break
        return times


def _on_hosts(
    hosts: Hosts, bundle: Bundle, groups: Mapping[str, Path], contest: Contest, name: str
) -> Generator[list[float]]:
    """Yield seconds of steps after each round, from when all ranks are within their quotas: they import libraries
    before."""
    order = bundle.module.rank_devices()
    ranks = [hosts.names.index(device) for device in order]
    metrics, log = contest.folder / f"{name}.jsonl", contest.folder / f"{name}.log"
    metrics.unlink(missing_ok=True)
    file = _data(bundle, contest, name)
    words = ["run", bundle.path, "--data", file, "--metrics", metrics, "--steps", 10**6]
    running: list[subprocess.Popen[str]] = []
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    meeting = [f"--nnodes={len(ranks)}", "--nproc-per-node=1", f"--master-addr={hosts.address(ranks[0])}"]
    with log.open("w+", encoding="utf-8") as out:
        try:
            for number, host in enumerate(ranks):
                identity = ["--master-port=29400", f"--node-rank={number}", f"--local-addr={hosts.address(host)}"]
                agent = [sys.executable, "-m", "torch.distributed.run", *meeting, *identity, "--no-python"]
                command = [*agent, sys.executable, "-m", "penstock", *map(str, words)]
                running.append(hosts.start(host, command, environment, out))
            _until(metrics, 1, running, log)
            for host in ranks:
                for process in hosts.processes_of(host):
                    (groups[hosts.names[host]] / "cgroup.procs").write_text(str(process))
            begun = len(_lines(metrics)) + WARM
            for turn in range(1, ROUNDS + 1):
                yield _until(metrics, begun + turn * (STEPS - 1), running, log)[begun:]
        finally:
            hosts.end(running)


def _until(metrics: Path, count: int, running: list[subprocess.Popen[str]], log: Path) -> list[float]:
    """Wait for so many steps, and return their seconds."""
    deadline = time.monotonic() + _SECONDS
    while len(found := _lines(metrics)) < count:
        ended = [process for process in running if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"the run has {len(found)} steps:\n{log.read_text(encoding='utf-8')}")
        time.sleep(_BREATH)
    return found[:count]


def _lines(metrics: Path) -> list[float]:
    if not metrics.exists():
        return []
    whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0]
    rows: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
    return [row["step_s"] for row in rows if "step_s" in row]


def _place(job: Job, groups: Mapping[str, Path]) -> None:
    """Move the workers into the groups of their devices."""
    for device, process in zip(job.module.rank_devices(), job.workers.process_ids(), strict=True):
        (groups[device] / "cgroup.procs").write_text(str(process))


def _data(bundle: Bundle, contest: Contest, name: str) -> Path:
    """Write a batch to a file: making random numbers would be work of the first stage that no plan counts."""
    file = contest.folder / f"{name}.npz"
    np.savez(file, **next(batches(bundle.module, 1)))
    return file
