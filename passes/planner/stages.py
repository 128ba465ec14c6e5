"""Costs of one stage for all ranges of layers at once, as matrices over (first layer, last layer + 1).

In: a table of layers at one microbatch size, a schedule, m. Out: `Option`s for the devices of a stage: without
recomputation, and with it where memory asks for it. Entries that are not allowed are infinite.

The microbatches of a batch are dealt out to replicas so that the slowest one is as fast as can be: the m smallest of n
* t_j over all n and j, each replica having at least `least` and at most what its memory holds. No other shares have a
smaller maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.ir.memory.passages import BUFFERS
from penstock.ir.memory.predict import BATCHES_AHEAD
from penstock.ir.memory.walk import POSTED
from penstock.passes.schedules.schedule import SCHEDULES

from .chain import Floats, Ints, Sums, Table
from .cost import base_of
from .fleet import Fleet, Ring
from .plan import PlanRequest

Bools = npt.NDArray[np.bool_]
_PLENTY = 1 << 40
_Number = TypeVar("_Number", np.float64, np.int64)


class Members(NamedTuple):
    """The devices of a stage, as far as its memory and seconds depend on them: their kinds, and whether they are
    `apart`, on several hosts, where optimiser state is shared out."""

    kinds: tuple[int, ...]
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage. `pace` and `ring` must stay below the limit that the search sets; the search sums up
    `cost`."""

    recompute: bool
    pace: Floats
    cost: Floats
    ring: Floats | None

    @property
    def elements(self) -> int:
        """Return how many elements its matrices have."""
        return self.pace.size * (1 + (self.cost is not self.pace) + (self.ring is not None))


class UnequalOption:
    """The option of unequal replicas. Costs are computed when they are asked for: all of them here, and those of some
    ranges of layers of several options by `Stages.priced`. Ranges that fit into memory are `fits`. Each replica takes
    at least so many microbatches, and its memory holds as many as there are, or those with `full` in flight."""

    def __init__(
        self,
        stages: Stages,
        recompute: bool,
        members: Members,
        full: int | None,
        least: int,
        sums: Ring,
        fits: Bools,
    ) -> None:
        self.stages, self.recompute, self.kinds, self.least = stages, recompute, members.kinds, least
        self.sums, self.fits = sums, fits
        # Options of one case are priced together.
        self.case = len(members.kinds), recompute, full, members.apart

    @cached_property
    def _whole(self) -> tuple[Floats, Floats, Floats]:
        first, last = np.nonzero(self.fits)
        priced = self.stages.priced([self], np.zeros_like(first), first, last)
        pace, cost, ring = (np.full(self.fits.shape, np.inf) for _ in priced)
        pace[first, last], cost[first, last], ring[first, last] = priced
        return pace, cost, ring

    @property
    def elements(self) -> int:
        """Return about how many elements of eight bytes its matrices have."""
        return self.fits.size // 8 + 3 * self.fits.size * ("_whole" in vars(self))

    @property
    def pace(self) -> Floats:
        return self._whole[0]

    @property
    def cost(self) -> Floats:
        return self._whole[1]

    @property
    def ring(self) -> Floats | None:
        return self._whole[2] if self.stages.row.delay else None


class Stages:
    """Costs of a stage for all ranges of layers at once, as matrices: of one table, schedule and number of
    microbatches. `all_devices` are those of the whole plan (where weight gradients are split off, what is in flight
    depends on it)."""

    def __init__(
        self,
        table: Table,
        fleet: Fleet,
        kinds: Sequence[int],
        schedule: str,
        count: int,
        wanted: PlanRequest,
        all_devices: int,
    ) -> None:
        self.table, self.fleet, self.kinds, self.schedule = table, fleet, kinds, schedule
        self.count, self.wanted, self.all_devices = count, wanted, all_devices
        self.row = SCHEDULES[schedule]
        # Microbatches of a batch that are no part of the steady phase.
        self.head = 0 if self.row.delay else 1
        n = table.count
        first, last = np.indices((n + 1, n + 1))
        # On one device, and on several.
        single = (first < last) & table.cut[:, None] & table.cut[None, :]
        self.allowed = (single, single & (_ranges(table.alone) == 0))
        self.grads = _ranges(table.grads)
        self.in_parts = wanted.recompute == "parts"
        self._seconds: dict[tuple[int, bool, int], tuple[Floats, Floats, Floats]] = {}
        self._room: dict[tuple[int, bool, int, bool], Ints] = {}
        self._equals: dict[tuple[object, ...], Option] = {}
        self._unequals: dict[tuple[object, ...], UnequalOption] = {}
        self._found: dict[tuple[object, ...], list[Option | UnequalOption]] = {}
        # The seconds of all kinds together.
        self._stacked: dict[tuple[bool, int], list[Floats]] = {}
        self._fitting: dict[tuple[object, ...], Bools] = {}
        self._members: dict[tuple[int, ...], Members] = {}
        self._ample: dict[tuple[object, ...], bool] = {}

    @cached_property
    def roomy(self) -> bool:
        """Return whether every device has room for the whole model with all microbatches of a batch in flight. Then
        memory is no limit, whatever the plan."""
        # With more replicas the bytes of each only grow or only shrink.
        apart = self.members(range(len(self.kinds))).apart
        most = [
            self.most_in_flight(kind, False, replicas, apart)
            for kind in dict.fromkeys(self.kinds)
            for replicas in sorted({1, 2, len(self.kinds)})
            if self.fleet.devices[kind].memory is not None
        ]
        return all(bool((room[self.allowed[0]] >= self.count).all()) for room in most)

    def options(self, devices: Sequence[int], later: int, ahead: int, ring: Ring) -> list[Option | UnequalOption]:
        """Return the ways to run a stage on these devices, with `later` devices in later stages and `ahead` forwards in
        hand."""
        members = self.members(devices)
        warm = self.row.warm_up(ahead)
        full = self.row.in_flight(self.count, warm, self.all_devices - later - len(devices), len(devices))
        key = (members, warm, full, ring.fixed, ring.each)
        if key not in self._found:
            self._found[key] = list(self._options(members, warm, full, ring))
        return self._found[key]

    def shares(
        self, devices: Sequence[int], later: int, ahead: int, recompute: bool, first: int, last: int
    ) -> tuple[int, ...]:
        """Return the shares of the replicas of one stage."""
        members = self.members(devices)
        kinds = members.kinds
        if len(set(kinds)) == 1:
            fewest, more = divmod(self.count, len(kinds))
            return (fewest + 1,) * more + (fewest,) * (len(kinds) - more)
        warm = self.row.warm_up(ahead)
        full = self.row.in_flight(self.count, warm, self.all_devices - later - len(devices), len(devices))
        here = (slice(first, first + 1), slice(last, last + 1))
        each = np.stack([self.times(kind, recompute)[0][here].ravel() for kind in kinds])
        held = np.stack(
            [room[here].ravel() for room in self.most_shares(kinds, full, recompute, len(kinds), members.apart)]
        )
        return tuple(int(n) for n in _shares(each, held, self.row.least_share(warm), self.count, self.head)[:, 0])

    def members(self, devices: Sequence[int]) -> Members:
        """Return what a stage depends on of its devices, which large fleets ask for again and again."""
        key = tuple(devices)
        if key not in self._members:
            apart = self.wanted.zero > 0 and self.fleet.is_apart(key)
            self._members[key] = Members(tuple(self.kinds[i] for i in key), apart)
        return self._members[key]

    def fitting(self, devices: Sequence[int], later: int, ahead: int) -> Bools:
        """Return the ranges for which `options` has any entry, without their costs: that is a small part of the
        work."""
        members = self.members(devices)
        warm = self.row.warm_up(ahead)
        full = self.row.in_flight(self.count, warm, self.all_devices - later - len(devices), len(devices))
        key = (members, warm, full)
        if key not in self._fitting:
            fits = [self._fits(members, warm, full, recompute) for recompute in self.recomputations()]
            self._fitting[key] = np.logical_or.reduce(fits)
        return self._fitting[key]

    def elements(self) -> int:
        """Return about how many elements the matrices of options have."""
        return sum(option.elements for options in self._found.values() for option in options)

    def least_sum(self, kind: int) -> Floats:
        """Return by how much each layer makes the sum over stages longer, at least, where it is on such a device."""
        forward, backward, weight, _, _ = self.table.times(self.fleet.devices[kind])
        sums = forward + backward - (2 * weight if self.row.splits else 0.0)
        return np.diff(sums)

    def _options(self, members: Members, warm: int, full: int, ring: Ring) -> list[Option | UnequalOption]:
        options: list[Option | UnequalOption] = []
        kinds = members.kinds
        if len(kinds) * self.row.least_share(warm) > self.count:
            return options
        for recompute in self.recomputations():
            option, everywhere = (self._equal if len(set(kinds)) == 1 else self._unequal)(
                members, warm, full, ring, recompute
            )
            if option is not None:
                options.append(option)
            if everywhere:
                break
        return options

    def recomputations(self) -> tuple[bool, ...]:
        return {"none": (False,), "all": (True,)}.get(self.wanted.recompute, (False, True))

    def _fits(self, members: Members, warm: int, full: int, recompute: bool) -> Bools:
        """Return the ranges of layers that memory allows these replicas."""
        kinds, apart = members
        allowed: Bools = self.allowed[len(kinds) > 1]
        least = self.row.least_share(warm)
        if len(kinds) * least > self.count:
            return np.zeros_like(allowed)
        if len(set(kinds)) == 1:
            alike: Bools = allowed & (
                self.most_in_flight(kinds[0], recompute, len(kinds), apart) >= self.needed(len(kinds), full)
            )
            return alike
        if self._all_roomy(members, full, recompute):
            return allowed
        held = np.stack(self.most_shares(kinds, full, recompute, len(kinds), apart))
        # Memory may hold far more microbatches than there are.
        fitting: Bools = allowed & (held >= least).all(0) & (np.minimum(held, self.count).sum(0) >= self.count)
        return fitting

    def _all_roomy(self, members: Members, full: int, recompute: bool) -> bool:
        """Return whether each of these replicas alone has memory for a whole batch, with any layers."""
        replicas = len(members.kinds)
        for kind in dict.fromkeys(members.kinds):
            key = kind, full, recompute, replicas, members.apart
            if key not in self._ample:
                room = self.most_in_flight(kind, recompute, replicas, members.apart)[self.allowed[1]]
                self._ample[key] = bool((room >= max(full, self.count)).all())
            if not self._ample[key]:
                return False
        return True

    def needed(self, replicas: int, full: int) -> int:
        """Return the microbatches in flight that each of some equal replicas must have room for."""
        most = -(-self.count // replicas)
        if not self.row.bounded:
            return most
        return full if self.row.delay else min(full, most)

    def most_shares(self, kinds: Sequence[int], full: int, recompute: bool, replicas: int, apart: bool) -> list[Ints]:
        """Return for each of some kinds the most microbatches of a batch that its memory lets it run, as one of so many
        replicas, `apart` or not; `full` are in flight when it runs many."""
        most = {}
        for kind in dict.fromkeys(kinds):
            room = self.most_in_flight(kind, recompute, replicas, apart)
            short = 0 if self.row.delay else room
            most[kind] = np.where(room >= full, self.count, short) if self.row.bounded else room
        return [most[kind] for kind in kinds]

    def _equal(self, members: Members, warm: int, full: int, ring: Ring, recompute: bool) -> tuple[Option | None, bool]:
        """Return the option of equal replicas, and whether memory allows it everywhere."""
        kinds = members.kinds
        replicas, kind = len(kinds), kinds[0]
        allowed = self.allowed[replicas > 1]
        fits = self._fits(members, warm, full, recompute)
        count = np.count_nonzero(fits)
        if not count:
            return None, False
        everywhere = bool(count == np.count_nonzero(allowed))
        key = (kinds, ring.fixed, ring.each, recompute)
        if key not in self._equals:
            times = self.times(kind, recompute, replicas)
            slowest = (-(-self.count // replicas) - self.head) * times[0]
            summing = np.asarray(ring.fixed + ring.each * self.grads, np.float64) if replicas > 1 else None
            priced = self._priced(np.where(allowed, slowest, np.inf), [[row] for row in times], replicas, summing)
            self._equals[key] = Option(recompute, *priced)
        whole = self._equals[key]
        if everywhere:
            return whole, True
        pace = np.where(fits, whole.pace, np.inf)
        return Option(recompute, pace, pace if self.row.delay else whole.cost, whole.ring), False

    def _unequal(
        self, members: Members, warm: int, full: int, ring: Ring, recompute: bool
    ) -> tuple[UnequalOption | None, bool]:
        """Return the option of unequal replicas, and whether memory allows it everywhere."""
        kinds, apart = members
        least = self.row.least_share(warm)
        key = (members, ring.fixed, ring.each, recompute, least)
        if key in self._unequals:
            return self._unequals[key], True
        if self._all_roomy(members, full, recompute):
            option, everywhere = UnequalOption(self, recompute, members, None, least, ring, self.allowed[1]), True
        else:
            held = self.most_shares(kinds, full, recompute, len(kinds), apart)
            everywhere = all(bool((room[self.allowed[1]] >= self.count).all()) for room in held)
            fits = self._fits(members, warm, full, recompute)
            if not fits.any():
                return None, everywhere
            option = UnequalOption(self, recompute, members, None if everywhere else full, least, ring, fits)
        if self.roomy:
            self._unequals[key] = option
        return option, everywhere

    def priced(
        self, options: Sequence[UnequalOption], which: Ints, first: Ints, last: Ints
    ) -> tuple[Floats, Floats, Floats]:
        """Return pace, cost and ring of ranges of layers that fit, each by the option of its number. The options have
        the same `case`."""
        replicas, recompute, full, apart = options[0].case
        number = {kind: n for n, kind in enumerate(dict.fromkeys(self.kinds))}
        kinds = np.array([[number[kind] for kind in option.kinds] for option in options])[which].T
        key = recompute, self.holders(replicas)
        if key not in self._stacked:
            rows = [self.times(kind, *key) for kind in number]
            self._stacked[key] = [np.stack([row[n] for row in rows]) for n in range(3)]
        each, weight, update = (seconds[kinds, first, last] for seconds in self._stacked[key])
        held = np.broadcast_to(np.int64(self.count), each.shape)
        if full is not None:
            rooms = self.most_shares([*number], full, recompute, replicas, apart)
            held = np.stack([room[first, last] for room in rooms])[kinds, np.arange(len(first))]
        fewest, fixed, part = np.array([(option.least, option.sums.fixed, option.sums.each) for option in options]).T
        shares = _shares(each, held, fewest.astype(np.int64)[which], self.count, self.head)
        slowest = ((shares - self.head) * each).max(0)
        summing: Floats = fixed[which] + part[which] * self.grads[first, last]
        pace, cost, ring = self._priced(slowest, (each, weight, update), replicas, summing)
        return pace, cost, cost if ring is None else ring

    def _priced(
        self, slowest: Floats, rows: Sequence[Sequence[Floats]], replicas: int, summing: Floats | None
    ) -> tuple[Floats, Floats, Floats | None]:
        """Return pace, cost and ring of a stage from the seconds of its slowest replica. `rows` are the seconds of its
        devices: of a microbatch, of weight gradients, of an update. `summing` are those of its sum of gradients."""
        each, weight, update = rows
        pace = slowest + _most(update)
        if self.row.delay:
            pace = replicas * pace
            return pace, pace, None if summing is None else np.asarray(replicas * summing, np.float64)
        if summing is not None:
            pace = pace + summing
        if self.row.splits:
            pace = pace + 2 * _most(weight)
            each = [np.maximum(t - 2 * w, 0.0) for t, w in zip(each, weight, strict=True)]
        return pace, _most(each), None

    def holders(self, replicas: int) -> int:
        """Return how many of so many replicas share out the updates of a stage, and its optimiser state."""
        return replicas if self.wanted.zero else 1

    def times(self, kind: int, recompute: bool, replicas: int = 1) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of a microbatch, its weight gradients and an update, for one of so many replicas."""
        key = kind, recompute, self.holders(replicas)
        if key not in self._seconds:
            forward, backward, weight, again, update = self.table.times(self.fleet.devices[kind])
            calls = self.table.chain.calls(self.fleet.devices[kind])
            ends = self.table.boundaries(calls)
            each = _ranges(forward) + _ranges(backward) + calls.microbatch + ends[:, None] + ends[None, :]
            self._seconds[key] = (
                each + _ranges(again) if recompute else each,
                _ranges(weight),
                _ranges(update) / key[2] + calls.update,
            )
        return self._seconds[key]

    def most_in_flight(self, kind: int, recompute: bool, replicas: int, apart: bool) -> Ints:
        """Return the most microbatches in flight that fit, for every range of layers; below 0 where not even the fixed
        bytes fit."""
        zero, copies, holders = self.wanted.zero > 0, self.row.gradient_copies(replicas), self.holders(replicas)
        # Without zero all numbers of replicas but one take as much.
        key = kind, recompute, replicas if zero else min(replicas, 2), apart
        if key not in self._room:
            table, memory = self.table, self.fleet.devices[kind].memory
            if memory is None:
                self._room[key] = np.full_like(table.workspace, _PLENTY)
            else:
                saved, is_host = _ranges(table.saved), self.fleet.devices[kind].kind != "cuda"
                places = np.arange(table.count + 1)
                sums = Sums(replicas, zero, apart, is_host)
                kept, workspace = table.exchanged(places[:, None], places[None, :], sums)
                fixed = (
                    _ranges(table.params) * self.row.versions
                    + _ranges(table.grads) * copies
                    - (-_ranges(table.state) // holders)
                    + _ranges(table.late) * (self.row.versions - copies)
                    + workspace
                    + kept
                )
                if is_host:
                    fixed = fixed + (BATCHES_AHEAD + 1) * table.b * self.row.waiting(self.count) * _ranges(table.fed)
                else:
                    crossing = table.crossing[:, None] + table.crossing[None, :]
                    fixed = fixed + BUFFERS * (table.b * _ranges(table.fed) + crossing)
                fixed = (
                    fixed
                    + (POSTED * table.out + table.back)[:, None]
                    + (POSTED * table.back + table.out)[None, :]
                    + base_of(self.fleet.devices[kind], self.wanted.base)
                )
                left = memory - fixed
                entry = np.broadcast_to(table.entry[:, None], saved.shape)
                if not recompute:
                    rooms = [_room(left, saved)]
                elif self.in_parts:
                    rooms = [_room(left - part.most, entry + part.kept) for part in table.parts()]
                else:
                    rooms = [_room(left - saved, entry)]
                self._room[key] = np.maximum.reduce(rooms)
        return self._room[key]


def _room(left: Ints, each: Ints) -> Ints:
    """Return how many times `each` bytes fit into those that are left; -1 where fewer than none are."""
    return np.where(left < 0, -1, np.where(each > 0, left // np.maximum(each, 1), _PLENTY))


def _ranges(sums: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Return for entry (i, j) the sum over layers i .. j-1, from prefix sums."""
    return sums[None, :] - sums[:, None]


def _most(matrices: Sequence[Floats]) -> Floats:
    largest = matrices[0]
    for matrix in matrices[1:]:
        largest = largest if matrix is largest else np.maximum(largest, matrix)
    return largest


def _shares(each: Floats, held: Ints, least: int, count: int, head: int) -> Ints:
    """Deal out `count` microbatches, by replica and case, so that max_j (n_j - head) t_j is least.

    Each share is at least `least` and at most what is held; `each` are the times of a microbatch. Every case must have
    a solution.
    """
    times = np.maximum(each, 1e-30)
    room = np.minimum(held, count)
    # Let T be the time at which replicas would end together if microbatches could be divided. All n with (n - head) t_j
    # <= T are among the smallest.
    together = (count - head * len(each)) / (1.0 / times).sum(0)
    start = np.clip(head + np.floor(together / times * (1 - 1e-12)), least, np.maximum(room, least)).astype(np.int64)
    shares = np.where(start.sum(0) > count, least, start)
    short = count - shares.sum(0)
    cases = np.flatnonzero(short)
    while len(cases):
        following = np.where(shares[:, cases] < room[:, cases], (shares[:, cases] + 1 - head) * times[:, cases], np.inf)
        shares[following.argmin(0), cases] += 1
        short[cases] -= 1
        cases = cases[short[cases] > 0]
    return shares
