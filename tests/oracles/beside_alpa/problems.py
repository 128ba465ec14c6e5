"""Problems that both the planner and Alpa can solve.

Chains of layers are drawn, on devices that are alike, one for each stage. Alpa's table of costs is the sum of a stage's
seconds, and its table of most stages behind a stage what memory allows under 1f1b. Problems of layouts are exported
from models (`exported`); a value goes to each of its takers by itself there, as Alpa prices it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.passes.planner.chain import Amount, Chain, Layer, Times
from penstock.passes.planner.fleet import Fleet, fleet_of
from penstock.planning.layouts.search import LayoutCosts, MovedValue, Taker

Array = npt.NDArray[np.float64]
DATA = Path(__file__).with_name("alpa.json")
TABLES = 200


@dataclass(frozen=True)
class DrawnTable:
    """Seconds of layers, bytes of their weights and of what a microbatch saves, the memory of each of some devices, and
    the microbatches of a batch."""

    seconds: tuple[float, ...]
    weights: tuple[int, ...]
    saved: tuple[int, ...]
    memory: int
    devices: int
    microbatches: int

    @classmethod
    def of(cls, seed: int) -> DrawnTable:
        rng = Random(seed)
        layers = range(rng.randint(2, 7))
        weights, saved = (tuple(rng.randint(1, 40) * 1000 for _ in layers) for _ in range(2))
        seconds = tuple(round(rng.uniform(0.1, 2.0), 3) for _ in layers)
        memory = int(sum(weights) * rng.uniform(0.5, 1.2) + sum(saved) * rng.uniform(0.5, 2.0))
        return cls(seconds, weights, saved, memory, rng.randint(1, 4), rng.randint(4, 12))

    def chain(self) -> Chain:
        """Return the planner's chain: a third of the seconds is forward, updates and messages take none."""
        seconds = self.seconds

        def timer(chain: Chain, device: Device, b: int) -> Times:
            forward = tuple(s / 3 for s in seconds)
            backward = tuple(s - f for s, f in zip(seconds, forward, strict=True))
            none = (0.0,) * len(seconds)
            return Times(forward, backward, none, forward, none)

        layers = [
            Layer(f"layer{i}", params=weight, saved=Amount(0, saved))
            for i, (weight, saved) in enumerate(zip(self.weights, self.saved, strict=True))
        ]
        return Chain(tuple(layers), timer=timer)

    def fleet(self) -> Fleet:
        names = [f"cpu:{i}" for i in range(self.devices)]
        devices = tuple(Device(name, spaces=(("ram", self.memory),)) for name in names)
        links = tuple(Link(a, b, 1e18, 0.0) for i, a in enumerate(names) for b in names[i + 1 :])
        return fleet_of(Cluster(devices, links))

    def costs(self) -> Array:
        """Return the seconds of stages by first and last layer."""
        n = len(self.seconds)
        return np.array([[sum(self.seconds[i : j + 1]) if i <= j else inf for j in range(n)] for i in range(n)])

    def most_behind(self) -> npt.NDArray[np.int64]:
        """Return how many stages may stand behind a stage, by first and last layer; -1 where it fits nowhere."""
        n = len(self.seconds)
        return np.array([[self._behind(i, j) if i <= j else -1 for j in range(n)] for i in range(n)])

    def _behind(self, first: int, last: int) -> int:
        weights, saved = (sum(listed[first : last + 1]) for listed in (self.weights, self.saved))
        fits = [k for k in range(self.devices) if weights + saved * min(self.microbatches, k + 1) <= self.memory]
        return max(fits, default=-1)


def apart(costs: LayoutCosts) -> LayoutCosts:
    """Return costs in which every taker moves a value for itself, as Alpa has them, with one value for each pair."""
    tables: dict[tuple[int, int], Array] = {}
    for moved in costs.crossings:
        for taker in moved.takers:
            pair = (moved.maker, taker.choice)
            added = moved.seconds[np.ix_(moved.gives, taker.needs)]
            if pair[0] == pair[1]:
                # A choice has one option at both ends.
                added = np.diag(np.diag(added))
            tables[pair] = tables.get(pair, np.zeros_like(added)) + added
    values = [
        MovedValue(maker, tuple(range(table.shape[0])), (Taker(choice, tuple(range(table.shape[1]))),), table)
        for (maker, choice), table in sorted(tables.items())
    ]
    return LayoutCosts(costs.seconds, costs.nbytes, values, costs.room)


def as_data(costs: LayoutCosts) -> dict[str, Any]:
    """Return costs as plain numbers: microseconds and KiB, with few digits."""
    return {
        "seconds": [[round(s * 1e6, 4) for s in row] for row in costs.seconds],
        "nbytes": [[round(n / 1024, 2) for n in row] for row in costs.nbytes],
        "room": round(costs.room / 1024, 2) if costs.room < inf else 0,
        "moved": [[m.maker, m.takers[0].choice, np.round(m.seconds * 1e6, 4).tolist()] for m in costs.crossings],
    }


def from_data(data: dict[str, Any]) -> LayoutCosts:
    """Return costs of plain numbers."""
    values = []
    for maker, choice, rows in data["moved"]:
        table = np.array(rows)
        ends = [tuple(range(size)) for size in table.shape]
        values.append(MovedValue(maker, ends[0], (Taker(choice, ends[1]),), table))
    return LayoutCosts(data["seconds"], data["nbytes"], values, data["room"] or inf)


def serialized(costs: LayoutCosts) -> dict[str, Any]:
    """Return costs as the arguments of Alpa's solver: all choices are held at one moment, and none are alike."""
    count = len(costs.seconds)
    pairs = [(value.maker, value.takers[0].choice) for value in costs.crossings]
    flat: Sequence[Array] = [value.seconds.ravel() for value in costs.crossings]
    return {
        "N": count,
        "M": costs.room if costs.room < inf else 0,
        "s_len_np": np.array([len(row) for row in costs.seconds]),
        "s_follow_np": np.full(count, -1),
        "E_np": np.array(pairs).ravel(),
        "A_np": np.zeros(0, np.int64),
        "L_np": np.array([count, *[0] * (count - 1), *range(count)]),
        "c_np": np.concatenate(costs.seconds),
        "d_np": np.zeros(sum(map(len, costs.seconds))),
        "m_np": np.concatenate(costs.nbytes),
        "r_np": np.concatenate(flat),
        "v_np": np.zeros(0),
    }
