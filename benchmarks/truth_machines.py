"""The unequal devices and links of truth.py, made on this host.

They are threads, quotas on processor time, one core for all, injected latency, and a token bucket on a loopback device.
In: a Configuration. Out: control groups, prefixes of commands, workers moved to their groups and cores. Linux; root for
quotas and buckets.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 10_000  # microseconds of a quota: short, so that a rank that waits at times saves little up


@dataclass(frozen=True)
class Configuration:
    """A run to predict.

    `quotas` are shares of a core, `threads` numbers of threads, rank by rank; `rate` bytes per second of the loopback
    device.
    """

    model: str
    stages: int
    schedule: str
    microbatches: int = 4
    recompute: str = "none"
    threads: tuple[int, ...] = ()
    quotas: tuple[float, ...] = ()
    latency: float = 0.0
    rate: float = 0.0
    one_core: bool = False

    @property
    def name(self) -> str:
        parts = [self.model, str(self.stages), self.schedule]
        parts += [self.recompute] if self.recompute != "none" else []
        parts += ["threads" + "".join(map(str, self.threads))] if self.threads else []
        parts += ["quota" + "+".join(f"{q:g}" for q in self.quotas)] if self.quotas else []
        parts += [f"late{self.latency * 1e3:g}ms"] if self.latency else []
        parts += [f"link{self.rate / 1e6:g}MBs"] if self.rate else []
        parts += ["onecore"] if self.one_core else []
        return "-".join(parts)

    def thread_count(self, rank: int) -> int:
        return self.threads[rank] if self.threads else 1

    def quota(self, rank: int) -> float:
        return self.quotas[rank] if self.quotas else 1.0


def own_group() -> Path | None:
    """Return the control group of this process, if groups can be made in it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        if names == "cpu" or names.startswith("cpu,"):
            group = GROUPS / place.strip("/")
            return group if os.access(group, os.W_OK) and (group / "cpu.shares").exists() else None
    return None


@contextmanager
def quota_groups(configuration: Configuration) -> Iterator[dict[int, Path]]:
    """Make a control group for each rank that has a quota."""
    groups: dict[int, Path] = {}
    try:
        for rank in range(configuration.stages):
            if configuration.quota(rank) < 1:
                base = own_group()
                assert base is not None, "checked before"
                groups[rank] = base / f"truth-{os.getpid()}-{rank}"
                groups[rank].mkdir()
                (groups[rank] / "cpu.cfs_period_us").write_text(str(PERIOD))
                quota = configuration.quota(rank) * configuration.thread_count(rank)
                (groups[rank] / "cpu.cfs_quota_us").write_text(str(int(PERIOD * quota)))
        yield groups
    finally:
        for group in groups.values():
            group.rmdir()


def prefixes(configuration: Configuration, groups: Mapping[int, Path]) -> dict[int, list[str]]:
    """Return for each rank the beginning of a command that starts it in its group or on its core."""
    commands: dict[int, list[str]] = {}
    for rank in range(configuration.stages):
        if rank in groups:
            commands[rank] = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(groups[rank])]
        else:
            commands[rank] = ["taskset", "-c", "0"] if configuration.one_core else []
    return commands


def place_workers(configuration: Configuration, processes: Sequence[int], groups: Mapping[int, Path]) -> None:
    for rank, process in enumerate(processes):
        if rank in groups:
            (groups[rank] / "cgroup.procs").write_text(str(process))
        if configuration.one_core:
            for task in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(task.name), {0})


def missing(configuration: Configuration) -> str:
    """Say why this host cannot run a configuration, "" if it can."""
    if configuration.quotas and own_group() is None:
        return "no control groups of processor time (cgroup v1, root)"
    if configuration.rate:
        attempt = subprocess.run(
            ["sh", "-c", f"{shaped(configuration.rate, 'truth-try')} && ip netns del truth-try"],
            capture_output=True,
            check=False,
        )
        if attempt.returncode:
            return "no network namespaces with shaped links (root, tc)"
    return ""


def shaped(rate: float, space: str) -> str:
    """Write a shell command for a network namespace whose loopback device lets so many bytes per second through."""
    bucket = f"tbf rate {int(rate * 8)}bit burst 128kb latency 500ms"
    return (
        f"ip netns add {space} && ip -n {space} link set lo up && ip netns exec {space} tc qdisc add dev lo root "
        f"{bucket}"
    )
