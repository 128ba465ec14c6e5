"""Blocks of memory that lie idle long enough to be elsewhere meanwhile.

In: a measured account (account.py), and how fast a device's memory is moved. Out: for every block its access intervals
and the longest time between two uses, and whether that is more than moving it out and back takes.

A use is an action that makes, writes or reads what is in the block, from its begin to its end. What moving would cost
other users of the link is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from penstock.ir.cluster.cluster import Cluster

from .account import Account, Life


@dataclass(frozen=True, slots=True)
class Way:
    """A place where a block could wait; bytes per second on the way there, and seconds that a transfer takes beside
    that."""

    place: str
    bandwidth: float
    latency: float

    def seconds(self, nbytes: int) -> float:
        """Return the seconds for moving so many bytes out and back."""
        return 2 * (self.latency + nbytes / self.bandwidth)


@dataclass(frozen=True, slots=True)
class Gap:
    """The time in which no action uses a block, from the end of action `after` to the begin of `before`, both by
    number."""

    after: int
    before: int
    seconds: float


def way_out(cluster: Cluster, device: str) -> Way:
    """Return the way from a device to memory outside of it. From a GPU it is the link to a CPU of its host, or the
    cluster's class of such links. On a CPU it leads to another place in host memory, where a copy reads and writes at
    the rate of the memory."""
    source = cluster.device(device)
    if source.kind == "cpu":
        return Way("host memory", source.bandwidth / 2, 0.0)
    hosts = [other for other in cluster.devices if (other.kind, other.host) == ("cpu", source.host)]
    if hosts:
        link = cluster.link(device, hosts[0].name)
        return Way(f"memory of {hosts[0].name}", link.bandwidth, link.latency)
    return Way("host memory", *cluster.link_class("host-to-device"))


def gaps(account: Account, life: Life) -> Iterator[Gap]:
    """Yield the times between uses of a block, in order."""
    for after, before in pairwise(life.uses):
        yield Gap(after, before, max(0.0, account.times[before][0] - account.times[after][1]))


def longest_gap(account: Account, life: Life) -> Gap | None:
    """Return the longest gap, or None where a block is used once or never."""
    return max(gaps(account, life), key=lambda gap: gap.seconds, default=None)


def idle_at(account: Account, life: Life, step: int, way: Way) -> bool:
    """Return whether an action falls into a time in which the block could be elsewhere."""
    return any(gap.after < step < gap.before and gap.seconds > way.seconds(life.nbytes) for gap in gaps(account, life))
