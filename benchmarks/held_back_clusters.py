"""The drawn clusters of held_back.py, and the rates of their devices.

In: nothing but a seed. Out: clusters as files would describe them, and control groups that make a device of a process.
A device is a thread with a quota on its processor time. Clusters of hosts have network cards of a given rate.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from namespaces import available
from shaped_links import PAYLOAD
from truth_machines import PERIOD, own_group

from penstock.doctor.examine import examine
from penstock.doctor.local import measured_cluster
from penstock.ir.cluster.cluster import MEASURED, OTHER_HOST, Cluster, Device, Host, LinkClass

COUNT, SEED, MOST = 30, 2026, 1.8
QUOTAS = (0.15, 0.25, 0.4, 0.6, 0.8, 1.0)
RATES = (12.5e6, 25e6, 50e6)
_SECONDS = 600
LATENCY, _HERE = 100e-6, "localhost"


@dataclass(frozen=True)
class Drawn:
    """A cluster: the share of a core of each device, and the bytes per second of the card of each host, 0 where all
    devices are on this host."""

    number: int
    quotas: tuple[float, ...]
    rate: float

    @property
    def names(self) -> list[str]:
        return [f"d{i}" for i in range(len(self.quotas))]

    def quota(self, device: str) -> float:
        return self.quotas[self.names.index(device)]

    def cluster(self, rates: Mapping[str, str]) -> Cluster:
        """Return the cluster with the rates that devices of these quotas have, from the text of a file of each."""
        pair = parsed(rates["0"])
        devices = tuple(
            _within(quota, parsed(rates[f"{quota:g}"]).devices[0], pair.devices[0], name, name if self.rate else _HERE)
            for name, quota in zip(self.names, self.quotas, strict=True)
        )
        classes = pair.classes
        if not self.rate:
            return Cluster(devices, classes=classes)
        bandwidth = self.rate * PAYLOAD
        hosts = tuple(Host(name, interface="eth0", nic_bandwidth=bandwidth) for name in self.names)
        others = tuple(c for c in classes if c.kind != OTHER_HOST)
        return Cluster(devices, hosts=hosts, classes=(*others, LinkClass(OTHER_HOST, bandwidth, LATENCY)))

    def __str__(self) -> str:
        cards = f", cards of {self.rate / 1e6:g} MB/s" if self.rate else ""
        return f"{' '.join(f'{quota:g}' for quota in self.quotas)} of a core{cards}"


def _within(quota: float, measured: Device, whole: Device, name: str, host: str) -> Device:
    """Return a device with the rates that it has by itself. The ends of messages, which two devices measure, take the
    processor time that they take with a `whole` core."""
    return replace(
        measured,
        name=name,
        host=host,
        spaces=(),
        quota=quota,
        quota_period=PERIOD / 1e6 if quota < 1 else 0.0,
        message_overhead=whole.message_overhead / quota,
        socket_bandwidth=whole.socket_bandwidth * quota,
        shared_overhead=whole.shared_overhead / quota,
        copy_bandwidth=whole.copy_bandwidth * quota,
    )


def draw() -> Iterator[Drawn]:
    """Draw the clusters: two to six devices that are not all alike, and together less than this machine has."""
    chance = random.Random(SEED)
    for number in range(COUNT):
        size = 2 + number % 5
        while True:
            quotas = tuple(chance.choice(QUOTAS) for _ in range(size))
            if sum(quotas) <= MOST and len(set(quotas)) > 1:
                break
        yield Drawn(number, quotas, chance.choice(RATES) if number % 3 == 2 else 0.0)


CLUSTERS = tuple(draw())


def quotas_in_use() -> list[float]:
    return sorted({quota for drawn in CLUSTERS for quota in drawn.quotas})


@contextmanager
def group_of(name: str, quota: float) -> Iterator[Path]:
    """Make a control group of processes that share so much of a core."""
    base = own_group()
    assert base is not None, "checked before"
    group = base / f"held-back-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        if quota < 1:
            (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD * quota)))
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a group whose processes are ending."""
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


def measured_file(quota: float, kind: str) -> str:
    """Return the text of a cluster file with one device, measured within its quota on one core: by `doctor`, or the
    `quick` way of plans without a cluster file. Quota 0 stands for two devices on two cores, and their links."""
    with group_of("rates", quota or 1) as group, tempfile.TemporaryDirectory(prefix="held-back-") as folder:
        file = Path(folder) / "one.toml"
        enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
        alone = ["taskset", "-c", "0"] if quota else []
        environment = os.environ | {"PENSTOCK_CACHE": folder}
        command = [*enter, *alone, sys.executable, __file__, kind, str(1 if quota else 2), str(file)]
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=_SECONDS, env=environment)
        return file.read_text(encoding="utf-8")


def while_waiting(quota: float) -> float:
    """Return how many times its quota a process has that waits 20 ms before each 12 ms that it computes."""
    with group_of("waits", quota) as group:
        enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
        done = subprocess.run(
            [*enter, sys.executable, "-c", _WAITING], capture_output=True, check=True, timeout=_SECONDS, text=True
        )
    return float(done.stdout) / quota


# Prints the part of a core that such a process has.
_WAITING = """
import time

taken = []
for turn in range(16):
    time.sleep(0.02)
    begin, spent = time.perf_counter(), time.process_time()
    while time.process_time() - spent < 0.012:
        pass
    taken.append(time.perf_counter() - begin)
print(0.012 * 12 / sum(taken[4:]))
"""


def missing() -> str:
    """Say why this host cannot make the clusters, "" if it can."""
    if own_group() is None:
        return "no control groups of processor time (cgroup v1, root)"
    if (os.cpu_count() or 1) < 2:
        return "less than two cores"
    return available()


def parsed(text: str) -> Cluster:
    with tempfile.TemporaryDirectory(prefix="held-back-") as folder:
        file = Path(folder) / "one.toml"
        file.write_text(text, encoding="utf-8")
        return Cluster.load(file)


def _measure(kind: str, count: int, file: Path) -> None:
    """Measure so many devices of one thread, and write their cluster file."""
    if kind == "doctor":
        report = examine((1,) * count)
        assert report is not None
        cluster = report.cluster
    else:
        cluster = measured_cluster(Cluster.local(count))
        assert all(device.source == MEASURED for device in cluster.devices), "the measurement failed"
    file.write_text(cluster.to_toml(), encoding="utf-8")


if __name__ == "__main__":
    _measure(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
