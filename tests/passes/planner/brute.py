"""The best plan by looking at all of them, from the formulas of docs/planner.md: shares no code with the planner but the data structures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import ceil, inf

from penstock.passes.planner.chain import Chain, Layer, Times
from penstock.passes.planner.fleet import Fleet
from penstock.passes.planner.plan import PlanRequest

POSTED = 2


def class_order(fleet: Fleet) -> list[int]:
    """Devices class by class: two belong together when exchanging them changes nothing."""
    n = len(fleet)

    def same(a: int, b: int) -> bool:
        swap = {a: b, b: a}
        alike = replace(fleet.devices[a], name="", host="") == replace(fleet.devices[b], name="", host="")
        return alike and all(
            fleet.path(i, j) == fleet.path(swap.get(i, i), swap.get(j, j)) for i in range(n) for j in range(n) if i != j
        )

    return [
        j
        for i in range(n)
        if not any(same(h, i) for h in range(i))
        for j in range(n)
        if j == i or (j > i and same(i, j))
    ]


def arrangements(devices: Sequence[int], order: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every list of disjoint, non-empty groups of devices, not all of which need be used; within a group as in `order`."""
    yield ()
    for size in range(1, len(devices) + 1):
        for group in combinations(devices, size):
            rest = [d for d in devices if d not in group]
            for more in arrangements(rest, order):
                yield (tuple(sorted(group, key=order.index)), *more)


def dealt(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for n in range(1, total - parts + 2):
        for more in dealt(total - n, parts - 1):
            yield (n, *more)


def best_of_all(chain: Chain, fleet: Fleet, wanted: PlanRequest, schedule: str, recompute: str | None = None) -> float:
    """Seconds of the best plan. What is computed again is whole stages, and parts of them only where no plan fits otherwise."""
    modes = {"auto": ("auto", "parts") if schedule != "zb-1f1b" else ("auto",)}.get(
        recompute or wanted.recompute, (recompute or wanted.recompute,)
    )
    found = inf
    for mode in modes:
        if found == inf:
            found = min(
                Brute(chain, fleet, schedule, b, wanted.batch // b, wanted.base, mode, zero=wanted.zero).run()
                for b in wanted.microbatch_sizes()
            )
    return found


class Brute:
    def __init__(
        self,
        chain: Chain,
        fleet: Fleet,
        schedule: str,
        b: int,
        m: int,
        base: int,
        recompute: str,
        nics: bool = True,
        zero: int = 0,
    ) -> None:
        self.layers, self.chain, self.fleet, self.schedule = chain.layers, chain, fleet, schedule
        self.b, self.m, self.base, self.nics, self.zero = b, m, base, nics, zero
        self.times: list[Times] = [chain.timer(chain, d, b) for d in fleet.devices]
        self.late = schedule in ("2bw", "eager-2bw")
        self.flags = {"auto": (False, True), "none": (False,), "all": (True,), "parts": (False, True)}[recompute]
        self.in_parts = recompute == "parts"
        self.best, self.plan = inf, None
        self.options_seen: dict[tuple, list] = {}

    def run(self) -> float:
        order = class_order(self.fleet)
        n = len(self.layers)
        for groups in arrangements(range(len(self.fleet)), order):
            if not groups or len(groups) > n:
                continue
            for cuts in combinations(range(1, n), len(groups) - 1):
                if all(self.layers[c].cut for c in cuts):
                    self._try(groups, (0, *cuts, n))
        return self.best

    def _try(self, groups: tuple[tuple[int, ...], ...], at: tuple[int, ...]) -> None:
        choices = []
        for s, group in enumerate(groups):
            # The microbatch is away for one of the stage behind, and all that has in hand; counted in microbatches of this replica, rounded up.
            hands = 0
            for q in range(len(groups) - 2, s - 1, -1):
                hands = ceil((hands * len(groups[q + 1]) + len(groups[q + 1])) / len(groups[q]))
            earlier = sum(len(g) for g in groups[:s])
            choices.append(self._options(group, at[s], at[s + 1], hands, earlier))
            if not choices[-1]:
                return
        trips, loads = [], []
        used: dict[str, float] = {}
        for s in range(len(groups) - 1):
            trip, load = self._boundary(groups[s], groups[s + 1], at[s + 1], used)
            trips.append(trip)
            loads.append(load)
        summed: dict[str, float] = {}
        rings = [self._ring(group, at[s], at[s + 1], summed) for s, group in enumerate(groups)]
        used = {name: used.get(name, 0.0) + summed.get(name, 0.0) for name in {*used, *summed}}
        floor = max(used.values(), default=0.0) if self.nics else 0.0
        for chosen in product(*choices):
            step = max(floor, self._step(groups, chosen, trips, loads, rings))
            if summed and self.nics and not self.late:
                step = max(step, self._stages(groups, chosen, trips, [0.0] * len(rings)) + max(summed.values()))
            if step < self.best:
                self.best, self.plan = step, (groups, at, chosen)

    def _options(self, group: tuple[int, ...], first: int, last: int, hands: int, earlier: int) -> list[tuple]:
        """(recompute, shares, seconds per replica, weight gradient seconds, update seconds) that memory and legality allow."""
        key = (group, first, last, hands, earlier if self.schedule == "zb-1f1b" else 0)
        if key in self.options_seen:
            return self.options_seen[key]
        r = len(group)
        warm = hands * (2 if self.schedule == "eager-2bw" else 1)
        least = {"2bw": max(warm, 1), "eager-2bw": max(warm, 1), "zb-1f1b": warm + 1}.get(self.schedule, 1)
        found = []
        for recompute in self.flags:
            for shares in dealt(self.m, r) if self.m >= r else ():
                if min(shares) < least:
                    continue
                fits = True
                for device, n in zip(group, shares, strict=True):
                    held = {"gpipe": n, "1f1b": min(n, warm + 1), "zb-1f1b": min(n, warm + 1 + ceil(earlier / r))}.get(
                        self.schedule, warm + 1
                    )
                    limit = self.fleet.devices[device].memory
                    fits &= limit is None or self._bytes(first, last, group, held, recompute) <= limit
                if fits:
                    seconds, weights, updates = [], [], []
                    for device in group:
                        t = self.times[device]
                        span = range(first, last)
                        seconds.append(
                            sum(t.forward[i] + t.backward[i] + (t.again[i] if recompute else 0) for i in span)
                        )
                        weights.append(sum(t.weight[i] for i in span))
                        updates.append(sum(t.update[i] for i in span) / (r if self.zero else 1))
                    found.append((recompute, shares, seconds, weights, updates))
        self.options_seen[key] = found
        return found

    def _again(self, first: int, last: int, held: int, coming: int) -> int:
        """Bytes of what is computed again: with every choice of cuts between parts, or with none."""
        found, inner = [], range(first + 1, last)
        for cuts in (
            cuts for count in range(last - first if self.in_parts else 1) for cuts in combinations(inner, count)
        ):
            ends = (first, *cuts, last)
            parts = [sum(x.saved.at(self.b) for x in self.layers[a:z]) for a, z in pairwise(ends)]
            found.append(held * (coming + sum(self.layers[c - 1].out.at(self.b) for c in cuts)) + max(parts))
        return min(found)

    def _bytes(self, first: int, last: int, group: tuple[int, ...], held: int, recompute: bool) -> int:
        b, layers, replicas = self.b, self.layers[first:last], len(group)
        saved = sum(x.saved.at(b) for x in layers)
        coming = self.layers[first - 1].out.at(b) if first else 0
        returned = self.layers[first - 1].back.at(b) if first else 0
        going = self.layers[last - 1].out.at(b) if last < len(self.layers) else 0
        returning = self.layers[last - 1].back.at(b) if last < len(self.layers) else 0
        kept = coming if first else self.chain.entry.at(b)
        return (
            sum(x.params for x in layers) * (2 if self.late else 1)
            + sum(x.grads for x in layers) * (2 if self.late and replicas > 1 else 1)
            + (self._exchanged(layers, group) if replicas > 1 else 0)
            + ceil(sum(x.state for x in layers) / (replicas if self.zero else 1))
            + (sum(x.late for x in layers) if self.late and replicas == 1 else 0)
            + (self._again(first, last, held, kept) if recompute else held * saved)
            + self._workspace(layers, replicas)
            + POSTED * (coming + returning)
            + going
            + returned
            + self.base
        )

    def _exchanged(self, layers: Sequence[Layer], group: tuple[int, ...]) -> int:
        """Bytes of sums over replicas. With zero, each sends and gets parts of gradients, over hosts from blocks, and
        has two blocks of each size for its parts of new weights, and one for each that comes from another host."""
        grads, replicas = sum(x.grads for x in layers), len(group)
        if not self.zero:
            return min(4 << 20, grads)
        others = replicas - 1 if len({self.fleet.devices[i].host for i in group}) > 1 else 0
        blocks = sum(ceil(size / replicas) for size in {size for x in layers for size in x.pieces})
        return 2 * others * ceil(grads / replicas) + (2 + others) * blocks

    def _workspace(self, layers: Sequence[Layer], replicas: int) -> int:
        """The most that a graph takes: with zero that may be a whole new weight, and the part that a replica made."""
        weights = [size for x in layers for size in x.pieces] if self.zero and replicas > 1 else []
        return max([*(x.workspace.at(self.b) for x in layers), *(size + ceil(size / replicas) for size in weights)])

    def _boundary(
        self, left: tuple[int, ...], right: tuple[int, ...], at: int, used: dict[str, float]
    ) -> tuple[float, float]:
        out, back = self.layers[at - 1].out.at(self.b), self.layers[at - 1].back.at(self.b)
        kinds = [{replace(self.fleet.devices[d], name="", host="") for d in group} for group in (left, right)]
        aligned = len(left) == len(right) and len(kinds[0]) == len(kinds[1]) == 1
        pairs = list(zip(left, right, strict=True)) if aligned else list(product(left, right))
        there, here, load = 0.0, 0.0, 0.0
        nics: dict[str, float] = {}
        for a, c in pairs:
            for x, y, size in ((a, c, out), (c, a, back)):
                path = self.fleet.path(x, y)
                speed = path.bandwidth
                for name, rate in path.shares:
                    ways = pairs if x == a else [(q, p) for p, q in pairs]
                    speed = min(speed, rate / len({p for p, q in ways if name in dict(self.fleet.path(p, q).shares)}))
                if size and x == a:
                    there = max(there, path.latency + size / speed)
                elif size:
                    here = max(here, path.latency + size / speed)
                load = max(load, size / len(pairs) / path.bandwidth)
                for name, speed in path.shares:
                    nics[name] = nics.get(name, 0.0) + size / len(pairs) / speed
        for name, seconds in nics.items():
            used[name] = used.get(name, 0.0) + self.m * seconds
        return there + here, max([load, *nics.values()])

    def _ring(self, group: tuple[int, ...], first: int, last: int, used: dict[str, float]) -> float:
        r = len(group)
        if r == 1:
            return 0.0
        part = sum(x.grads for x in self.layers[first:last]) / r
        slowest, latency = 0.0, 0.0
        nics: dict[str, float] = {}
        for a, b in zip(group, (*group[1:], group[0]), strict=True):
            path = self.fleet.path(a, b)
            latency = max(latency, path.latency)
            slowest = max(slowest, part / path.bandwidth)
            for name, speed in path.shares:
                nics[name] = nics.get(name, 0.0) + part / speed
        for name, seconds in nics.items():
            used[name] = used.get(name, 0.0) + 2 * (r - 1) * seconds
        return 2 * (r - 1) * (latency + max([slowest, *nics.values()]))

    def _step(self, groups: tuple, chosen: tuple, trips: list[float], loads: list[float], rings: list[float]) -> float:
        m, d = self.m, len(groups)
        if self.late:
            busy = [max(n * t for n, t in zip(x[1], x[2], strict=True)) + max(x[4]) for x in chosen]
            k = 2 if self.schedule == "eager-2bw" else 1
            step = max([*busy, *rings, *(m * load for load in loads)])
            for p in range(d):
                for q in range(p + 1, d):
                    trip = sum(len(groups[s]) * busy[s] for s in range(p, q + 1)) + m * sum(trips[p:q])
                    step = max(step, trip / (len(groups[p]) + k * sum(len(groups[s]) for s in range(p + 1, q + 1))))
            return step
        pace = [(m - 1) * load for load in loads]
        total = sum(trips) + self._sum(chosen)
        return max([self._stages(groups, chosen, trips, rings), *(total + x for x in pace)])

    def _sum(self, chosen: tuple) -> float:
        parted = self.schedule == "zb-1f1b"
        return sum(max(max(t - 2 * w, 0) if parted else t for t, w in zip(x[2], x[3], strict=True)) for x in chosen)

    def _stages(self, groups: tuple, chosen: tuple, trips: list[float], rings: list[float]) -> float:
        """What the slowest stage of a schedule that drains makes of a batch."""
        m, d, parted = self.m, len(groups), self.schedule == "zb-1f1b"
        total, pace = sum(trips) + self._sum(chosen), 0.0
        for s, x in enumerate(chosen):
            steady = max((n - 1) * t for n, t in zip(x[1], x[2], strict=True)) + rings[s] + max(x[4])
            if self.schedule not in ("gpipe", "forward") and s + 1 < d:
                steady += (ceil(m / len(groups[s])) - 1) * trips[s]
            pace = max(pace, steady + (2 * max(x[3]) if parted else 0))
        return total + pace
