"""The placement with the least latency: the time of one sample alone, from its inputs to its last output. For inference
only.

calls.py defines the latency of a placement. Small problems are searched in full, by branch and bound: colours in the
order of the graph, every place, as long as the lower bound of a partial placement is below the best known value. That
bound is a path through what is placed and the rest at its fastest. Where that takes more than `tries` steps an integer
programme goes on (latency_programme.py), if it is not too large. All of it starts from the best of a few placements,
improved by moving one colour at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from penstock.support.errors import DoesNotFit

from .bounds import check_room
from .calls import Places, latency
from .contiguous import split_contiguously
from .latency_programme import minimise
from .problem import Placement, PlacementProblem, Progress
from .sources import without_sources
from .units import units_of

TRIES = 20_000
NODES = 2_000


def place_for_latency(
    problem: PlacementProblem, tries: int = TRIES, nodes: int = NODES, progress: Progress | None = None
) -> Placement:
    """Return the placement with the smallest latency."""
    check_room(problem, units_of(problem, contiguous=False))
    small, home = without_sources(problem)
    placement = _place(Places.of(small), tries, nodes, progress)
    return replace(placement, problem=problem, device_of=tuple(placement.device_of[n] for n in home))


def _place(places: Places, tries: int, nodes: int, progress: Progress | None) -> Placement:
    best, value = _begin(places)
    search = _PlaceSearch(places, list(best), value, tries, progress)
    search.go_on(0, [-1] * len(places.units), search.floor([-1] * len(places.units)))
    size = f"{len(places.units)} colours in {len(places)} places"
    if search.tries >= 0:
        if search.value == inf:
            raise DoesNotFit("no placement fits the memory of the devices", hint="add devices or memory")
        return places.placement(search.best, search.value, search.value, (f"{size}: searched in full",))
    place_of, bound, count = minimise(
        places, search.best if search.value < inf else None, search.value, nodes, progress
    )
    value = latency(places, place_of) if place_of is not None else inf
    if value >= search.value:
        place_of, value = search.best, search.value
    if place_of is None or value == inf:
        raise DoesNotFit(
            f"no placement found that fits the memory of the devices, in {count} nodes of the search tree",
            hint="add memory",
        )
    bound = max(bound, search.floor([-1] * len(places.units)))
    how = (
        f"integer programme, {count} nodes of the search tree"
        if count >= 0
        else "too large for an integer programme, moved one by one"
    )
    return places.placement(place_of, value, bound, (f"{size}: {how}",))


def _begin(places: Places) -> tuple[list[int], float]:
    """Improve a few simple placements by moving one colour at a time, and return the best of them."""
    count = len(places.units)
    starts = [[place] * count for place in range(len(places)) if places.twins(place) == place]
    try:
        device_of = split_contiguously(places.problem).device_of
        kinds = places.problem.devices
        place_of_device = {
            d: next(p for p in range(len(places)) if places.device_of[p] in (d, kinds.index(kinds[d])))
            for d in set(device_of)
        }
        place_of_device |= {d: p for p, d in enumerate(places.device_of)}
        starts.append([place_of_device[device_of[nodes[0]]] for nodes in places.units.nodes])
    except DoesNotFit:
        pass
    best, value = starts[0], inf
    for start in starts:
        place_of, result = _improved(places, start)
        if result < value:
            best, value = place_of, result
    return best, value


def _improved(places: Places, start: list[int]) -> tuple[list[int], float]:
    place_of, value = list(start), latency(places, start)
    moved = value < inf
    while moved:
        moved = False
        for unit in range(len(place_of)):
            home = place_of[unit]
            for place in range(len(places)):
                place_of[unit] = place
                moved_value = latency(places, place_of) if place != home else value
                if moved_value < value:
                    value, home, moved = moved_value, place, True
            place_of[unit] = home
    return place_of, value


class _PlaceSearch:
    """A depth-first search over every place for every colour, until `tries` steps are made; then `tries` is
    negative."""

    def __init__(self, places: Places, best: list[int], value: float, tries: int, progress: Progress | None) -> None:
        self.places, self.best, self.value, self.tries, self._progress, self._all = (
            places,
            best,
            value,
            tries,
            progress,
            tries,
        )
        position = {n: i for i, n in enumerate(places.order)}
        self._units = sorted(range(len(places.units)), key=lambda u: min(position[n] for n in places.units.nodes[u]))
        # Per node and place; the last column is for nodes without a place: the time where they are fastest.
        self._times = [[n.times[k] for k in places.kind_of] for n in places.problem.nodes]
        self._times = [[*times, min(t for t in times)] for times in self._times]

    def go_on(self, depth: int, place_of: list[int], floor: float) -> None:
        self.tries -= 1
        if self._progress is not None and self.tries % 1024 == 0:
            self._progress(self._all - self.tries, self._all, "placements tried")
        if self.tries < 0 or floor >= self.value:
            return
        if depth == len(self._units):
            value = latency(self.places, place_of)
            if value < self.value:
                self.best, self.value = list(place_of), value
            return
        unit = self._units[depth]
        ways = []
        for place in self._choices(place_of):
            place_of[unit] = place
            if self.places.has_room(place_of):
                ways.append((self.floor(place_of), place))
        for below, place in sorted(ways):
            place_of[unit] = place
            self.go_on(depth + 1, place_of, below)
        place_of[unit] = -1

    def _choices(self, place_of: Sequence[int]) -> Iterator[int]:
        """Yield the places to try. Of equal places that are empty only the first is tried."""
        used = set(place_of)
        fresh: set[int] = set()
        for place in range(len(self.places)):
            twin = self.places.twins(place)
            if place in used or twin not in fresh:
                yield place
            if place not in used:
                fresh.add(twin)

    def floor(self, place_of: Sequence[int]) -> float:
        """Return a lower bound on all placements of the rest: the longest path, and the work that each accelerator has
        already."""
        end = [0.0] * len(self._times)
        busy = [0.0] * (len(self.places) + 1)
        for n in self.places.order:
            place = place_of[self.places.unit_of[n]]
            time = self._times[n][place]
            end[n] = max((end[m] for m in self.places.makers[n]), default=0.0) + time
            busy[place] += time
        return max(*end, *(busy[p] for p in range(len(self.places)) if not self.places.is_host(p)), 0.0)
