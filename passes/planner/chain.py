"""The planner's model of a network: a chain of layers, in order, with costs as functions of the device and of b, the
samples of a microbatch.

Seconds come from a `Timer`, called once per kind of device and b:

    Roofline       max(flops / rate, bytes / bandwidth) of work that grows with b
    any function   (chain, device, b) -> Times

Bytes are `Amount`s, fixed + each * b. A layer's `saved` is what its forward leaves for its backward. `out` are the
values that cross the boundary behind it: all that is made before and used later, skip edges included. `back` are the
gradients of these, which come back. Parameters, gradients and optimiser state do not depend on b. `cut` says whether a
stage may start at the layer.

Limits: a chain, in this order; what several layers read (tied parameters) belongs to one of them, or no cut is allowed
between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from penstock.ir.cluster.cluster import Device
from penstock.ir.memory.exchanges import RING
from penstock.ir.memory.passages import BUFFERS
from penstock.ir.memory.predict import BATCHES_AHEAD
from penstock.support.errors import UsageError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# Positions in a chain: one, or an array of them.
At = int | Ints


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes (or operations) of a microbatch of b samples: fixed + each * b."""

    fixed: int = 0
    each: int = 0

    def at(self, b: int) -> int:
        return self.fixed + self.each * b


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """The work of one phase of a layer for the roofline: operations, and bytes to and from memory."""

    flops: Amount = Amount()
    moved: Amount = Amount()


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the chain, with its bytes and its work.

    `weight` is the part of `backward` that makes weight gradients; `again` what recomputation repeats (by default the
    whole forward). `fed` are bytes of one sample of the data that the layer takes itself. `late` are bytes beside these
    under schedules with a delay, without replicas. A layer that is `alone` changes variables with every microbatch, and
    so is on one device only. `pieces` are the bytes of each of its gradients.
    """

    name: str
    params: int = 0
    grads: int = 0
    state: int = 0
    saved: Amount = Amount()
    out: Amount = Amount()
    back: Amount = Amount()
    workspace: Amount = Amount()
    cut: bool = True
    fed: int = 0
    late: int = 0
    alone: bool = False
    pieces: tuple[int, ...] = ()
    forward: PhaseWork = PhaseWork()
    backward: PhaseWork = PhaseWork()
    weight: PhaseWork = PhaseWork()
    again: PhaseWork | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of every layer on one device, for one microbatch; `update` once per batch. `backward` includes
    `weight`."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    again: tuple[float, ...]
    update: tuple[float, ...]


Timer = Callable[["Chain", Device, int], Times]


def roofline(chain: Chain, device: Device, b: int) -> Times:
    """Price every phase of every layer by itself. An update reads and writes parameters, gradients and state."""

    def seconds(work: PhaseWork) -> float:
        return max(work.flops.at(b) / device.flops, work.moved.at(b) / device.bandwidth)

    layers = chain.layers
    return Times(
        tuple(seconds(x.forward) for x in layers),
        tuple(seconds(x.backward) for x in layers),
        tuple(min(seconds(x.weight), seconds(x.backward)) for x in layers),
        tuple(seconds(x.forward if x.again is None else x.again) for x in layers),
        tuple((2 * x.params + x.grads + 2 * x.state) / device.bandwidth for x in layers),
    )


@dataclass(frozen=True, slots=True)
class Calls:
    """Overheads of a stage that do not depend on its layers.

    Seconds for the graphs of a microbatch, for an update, and for an end of a message and each of its bytes.
    """

    microbatch: float = 0.0
    update: float = 0.0
    message: float = 0.0
    byte: float = 0.0


@dataclass(frozen=True)
class Chain:
    """A chain of layers with the source of its times.

    `entry` are the bytes of a microbatch of the model's inputs, which the first stage keeps where it computes again.
    `calls` are the overheads of a stage on a device. `sizes` are the microbatches that there are times of (empty: of
    all).
    """

    layers: tuple[Layer, ...]
    timer: Timer = field(default=roofline)
    entry: Amount = Amount()
    calls: Callable[[Device], Calls] = lambda device: Calls()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError("there are no layers to plan for")


# The number of limits under which ranges of long chains are computed again, each 0.7 times the one before.
_LIMITS = 16
_FAR = 1 << 60


@dataclass(frozen=True, slots=True)
class Sums:
    """The replicas of a stage that add up gradients: how many these are, whether they share optimiser state out
    (`zero`), whether some are `apart`, on other hosts, and whether their memory is that of hosts. NCCL's own is not
    counted."""

    replicas: int
    zero: bool
    apart: bool
    on_hosts: bool


@dataclass(frozen=True, slots=True)
class RepeatedRanges:
    """Ranges of layers whose forward is computed again part by part. Entry (i, j) is for layers i .. j-1.

    `kept` bytes of every microbatch stay between the parts. `most` bytes are those of one part, which is there while
    its backward runs.
    """

    kept: Ints
    most: Ints


class Table:
    """A chain at one b: prefix sums of bytes, and per kind of device of seconds. Row i of a prefix sum is for layers 0
    .. i-1."""

    def __init__(self, chain: Chain, b: int) -> None:
        self.chain, self.b, self.count = chain, b, len(chain.layers)
        layers = chain.layers
        self.params, self.grads, self.state, self.late = (
            self._sums([getattr(x, what) for x in layers]) for what in ("params", "grads", "state", "late")
        )
        self.saved = self._sums([x.saved.at(b) for x in layers])
        self.fed = self._sums([x.fed for x in layers])
        self.alone = self._sums([int(x.alone) for x in layers])
        # The bytes that cross position i, forwards and backwards: none before the first layer and behind the last.
        self.out = np.array([0, *(x.out.at(b) for x in layers[:-1]), 0], np.int64)
        self.back = np.array([0, *(x.back.at(b) for x in layers[:-1]), 0], np.int64)
        self.crossing = self.out + self.back
        self.entry = self.out.copy()
        self.entry[0] = chain.entry.at(b)
        self.cut = np.array([True, *(x.cut for x in layers[1:]), True])
        self.workspace = np.zeros((self.count + 1, self.count + 1), np.int64)
        sizes = [x.workspace.at(b) for x in layers]
        for first in range(self.count):
            self.workspace[first, first + 1 :] = list(accumulate(sizes[first:], max))
        # How many layers up to a position have a gradient of a size.
        self._users = {
            size: self._sums([int(size in x.pieces) for x in layers])
            for size in sorted({size for x in layers for size in x.pieces})
        }
        self._times: dict[Device, tuple[Floats, ...]] = {}
        self._parts: list[RepeatedRanges] = []

    def _sums(self, values: list[int]) -> Ints:
        return np.concatenate([[0], np.cumsum(np.array(values, np.int64))])

    def parts(self) -> list[RepeatedRanges]:
        """Return ways to compute ranges of layers again in parts, for several limits on the bytes of a part. The first
        way takes the range as a whole."""
        if not self._parts:
            sizes = {
                int(self.saved[last] - self.saved[first])
                for first in range(self.count)
                for last in range(first + 1, self.count + 1)
            }
            limits = sorted(sizes, reverse=True)
            if len(limits) > _LIMITS:
                limits = [int(limits[0] / 2 ** (step / 2)) for step in range(_LIMITS)]
            self._parts = [self._part(limit) for limit in limits]
        return self._parts

    def _part(self, limit: int) -> RepeatedRanges:
        """Return the way with the least kept bytes among those whose parts take no more than the limit, as far as
        single layers let them."""
        n = self.count
        ends = np.arange(n + 1)
        kept, most = np.zeros((n + 1, n + 1), np.int64), np.zeros((n + 1, n + 1), np.int64)
        for first in range(n - 1, -1, -1):
            reach = max(first + 1, int(np.searchsorted(self.saved, self.saved[first] + limit, "right")) - 1)
            # The first part of a range that goes further ends at one of these; a row for each.
            cuts = ends[first + 1 : reach + 1]
            behind = np.where(ends[None, :] > cuts[:, None], self.out[cuts][:, None] + kept[cuts], _FAR)
            best = behind.argmin(0)
            kept[first] = np.where(ends <= reach, 0, behind[best, ends])
            whole = self.saved - self.saved[first]
            most[first] = np.where(
                ends <= reach, np.maximum(whole, 0), np.maximum(whole[cuts[best]], most[cuts[best], ends])
            )
        return RepeatedRanges(kept, most)

    def exchanged(self, first: At, last: At, sums: Sums) -> tuple[Ints, Ints]:
        """Return the bytes that a replica of layers first .. last-1 keeps for sums with others and for new weights, and
        its workspace. Both are those of ir/memory/exchanges.py, which looks at the program."""
        grads, workspace = self.grads[last] - self.grads[first], self.workspace[first, last]
        if sums.replicas == 1:
            return np.zeros_like(workspace), workspace
        if not sums.zero:
            return np.minimum(RING, grads) * sums.on_hosts, workspace
        # Gradients are read where they lie, on other hosts from blocks of those that are sent and of those that come.
        # One block of each size more: a new weight may be read yet when the next is written.
        others = sums.replicas - 1 if sums.apart else 0
        kept = 2 * others * -(-grads // sums.replicas)
        for size, users in self._users.items():
            part = -(-size // sums.replicas)
            has_one = users[last] > users[first]
            kept = kept + has_one * (2 + others) * part
            workspace = np.maximum(workspace, has_one * (size + part))
        return kept * sums.on_hosts, workspace

    def boundaries(self, calls: Calls) -> Floats:
        """Return in entry i the seconds that messages of a microbatch across position i take of each of the two devices
        there."""
        moved = self.out + self.back
        ends = (self.out > 0).astype(np.int64) + (self.back > 0)
        return np.asarray(ends * calls.message + moved * calls.byte, np.float64)

    def data(self, first: int, last: int, device: Device, batch: int) -> int:
        """Return the bytes of the batches that wait in the memory of a host, until a stage takes them.

        On a GPU they are those of the buffers that inputs and messages go through.
        """
        fed = int(self.fed[last] - self.fed[first])
        if device.kind != "cuda":
            return (BATCHES_AHEAD + 1) * batch * fed
        return BUFFERS * (self.b * fed + int(self.crossing[first] + self.crossing[last]))

    def times(self, device: Device) -> tuple[Floats, ...]:
        """Return prefix sums of forward, backward, weight gradient, recomputation and update seconds."""
        if device not in self._times:
            times = self.chain.timer(self.chain, device, self.b)
            columns = (times.forward, times.backward, times.weight, times.again, times.update)
            if any(len(column) != self.count for column in columns):
                raise UsageError(
                    f"times for {self.count} layers are needed, on {device.name} there are {[len(c) for c in columns]}"
                )
            self._times[device] = tuple(
                np.concatenate([[0.0], np.cumsum(np.array(column, np.float64))]) for column in columns
            )
        return self._times[device]
