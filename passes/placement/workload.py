"""Reader for the public device-placement format: a JSON object with a graph and the numbers of accelerators and CPUs.

    maxSizePerFPGA   bytes that an accelerator holds           maxFPGAs, maxCPUs   how many there are
    nodes            id, supportedOnFpga, cpuLatency, fpgaLatency, isBackwardNode, and perhaps size (bytes on an
                     accelerator), colorClass, name
    edges            sourceId, destId, cost: time to move the source's output between an accelerator and the host,
                     the same for all edges of a source

Accelerators pay transfers, CPUs do not and have no memory limit. Flags are booleans, 0 or 1. Anything else in an object
is for people, and ignored. All problems of a file are reported at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TypeVar

import networkx as nx

from penstock.support.errors import UsageError
from penstock.support.words import itemised

from .problem import DeviceKind, PlacedNode, PlacementProblem

T = TypeVar("T")
D = TypeVar("D")
_SHOWN = 20
_SAME_COST = 1e-6
# Far above any meaningful amount, and far below where sums overflow.
_MOST = 1e100


@dataclass(frozen=True, slots=True)
class Workload:
    """A problem read from a file. `ids[i]` is the id of node i in the file."""

    ids: tuple[int, ...]
    problem: PlacementProblem


def load_json(path: str | Path) -> object:
    """Return the content of a file of JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"no JSON: {error}", where=str(path)) from error


def load_workload(path: str | Path) -> Workload:
    """Read a workload from a file."""
    return read_workload(load_json(path), str(path))


def read_workload(data: object, where: str = "") -> Workload:
    """Check the content of a file, and make the problem of it."""
    reader = _WorkloadReader()
    workload = reader.read(data)
    reader.report(where)
    return workload


class FieldReader:
    """A reader of objects of JSON, which collects their problems. What it read is only valid if there are none."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def report(self, where: str) -> None:
        """Raise one error with all problems."""
        if self.problems:
            shown = itemised(self.problems[:_SHOWN])
            more = f"\n  - and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
            raise UsageError(f"the workload has problems:{shown}{more}", where=where)

    def rows(self, data: Mapping[str, object], key: str, where: str = "") -> Iterable[Mapping[str, object]]:
        """Yield the objects of a list."""
        rows, name = data.get(key), f"{where}: {key}" if where else key
        if not isinstance(rows, list):
            problem = "is missing" if key not in data else f"must be a list, got {kind_of(rows)}"
            self.problems.append(f"{name} {problem}")
            return
        for i, row in enumerate(rows):
            if isinstance(row, dict):
                yield row
            else:
                self.problems.append(f"{name}[{i}] must be an object, got {kind_of(row)}")

    def pick(self, row: Mapping[str, object], key: str, where: str, read: Callable[[object], T], default: D) -> T | D:
        """Return a field, or the default beside a problem where it is missing or cannot be read."""
        name = f"{where}: {key}" if where else key
        if key not in row:
            self.problems.append(f"{name} is missing")
            return default
        try:
            return read(row[key])
        except ValueError as error:
            self.problems.append(f"{name} must be {error}, got {_text(row[key])}")
            return default

    def check_once(self, ids: Iterable[int]) -> None:
        """Note each node that is listed more than once."""
        self.problems += [
            f"node {number} is listed {count} times" for number, count in Counter(ids).items() if count > 1
        ]

    def ends(self, row: Mapping[str, object], where: str, position: Mapping[int, int]) -> tuple[int, int] | None:
        """Return the ends of an edge as positions of nodes."""
        first, last = (self.pick(row, key, where, whole, None) for key in ("sourceId", "destId"))
        if first is None or last is None:
            return None
        unknown = [end for end in (first, last) if end not in position]
        self.problems += [f"{where} leads from {first} to {last}, there is no node {end}" for end in unknown]
        return None if unknown else (position[first], position[last])

    def check_order(self, ids: Sequence[int], edges: Iterable[tuple[int, int]]) -> None:
        """Note a circle of edges."""
        graph = nx.DiGraph(edges)
        if not nx.is_directed_acyclic_graph(graph):
            around = [ids[source] for source, _ in nx.find_cycle(graph)]
            self.problems.append(f"edges lead round a circle: {' -> '.join(map(str, [*around, around[0]]))}")


class _WorkloadReader(FieldReader):
    """A reader of a workload."""

    def read(self, data: object) -> Workload:
        if not isinstance(data, dict):
            self.problems.append(f"expected an object with nodes and edges, got {kind_of(data)}")
            data = {}
        limit = self.pick(data, "maxSizePerFPGA", "", amount, 0.0)
        accelerators = self.pick(data, "maxFPGAs", "", count, 0)
        cpus = self.pick(data, "maxCPUs", "", count, 0)
        ids: list[int] = []
        nodes: list[PlacedNode] = []
        for i, row in enumerate(self.rows(data, "nodes")):
            number = self.pick(row, "id", f"nodes[{i}]", whole, None)
            nodes.append(self._node(row, f"nodes[{i}]" if number is None else f"node {number}"))
            ids += [] if number is None else [number]
        position = {number: i for i, number in enumerate(ids)}
        self.check_once(ids)
        if not nodes:
            self.problems.append("there are no nodes")
        if accelerators + cpus == 0:
            self.problems.append("there are no devices: maxFPGAs and maxCPUs are both 0")
        edges, nodes = self._edges(data, position, nodes)
        if not self.problems:
            for source, target in edges:
                if nodes[source].backward and not nodes[target].backward:
                    self.problems.append(
                        f"an edge leads from backward node {ids[source]} to forward node {ids[target]}"
                    )
            self.check_order(ids, edges)
        kinds = (DeviceKind("accelerator", accelerators, limit), DeviceKind("CPU", cpus, pays_transfers=False))
        return Workload(tuple(ids), PlacementProblem(kinds, tuple(nodes), tuple(edges)))

    def _node(self, row: Mapping[str, object], where: str) -> PlacedNode:
        supported = self.pick(row, "supportedOnFpga", where, flag, True)
        slow = self.pick(row, "cpuLatency", where, amount, 0.0)
        fast = self.pick(row, "fpgaLatency", where, amount, 0.0)
        backward = self.pick(row, "isBackwardNode", where, flag, False)
        size = self.pick(row, "size", where, amount, 0.0) if "size" in row else 0.0
        colour = self.pick(row, "colorClass", where, whole, 0) if row.get("colorClass") is not None else None
        return PlacedNode(where.removeprefix("node "), (fast if supported else inf, slow), size, 0.0, colour, backward)

    def _edges(
        self, data: Mapping[str, object], position: Mapping[int, int], nodes: list[PlacedNode]
    ) -> tuple[list[tuple[int, int]], list[PlacedNode]]:
        costs: dict[int, float] = {}
        edges: list[tuple[int, int]] = []
        for i, row in enumerate(self.rows(data, "edges")):
            cost = self.pick(row, "cost", f"edges[{i}]", amount, 0.0)
            ends = self.ends(row, f"edges[{i}]", position)
            if ends is None:
                continue
            source, _ = ends
            if abs(costs.setdefault(source, cost) - cost) > _SAME_COST:
                self.problems.append(
                    f"edges from node {row['sourceId']} cost {costs[source]:g} and {cost:g}, "
                    "expected one cost for its output"
                )
            edges.append(ends)
        return edges, [replace(node, transfer=costs.get(i, 0.0)) for i, node in enumerate(nodes)]


def amount(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ValueError(f"a number from 0 to {_MOST:g}")
    return float(value)


def whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return value


def count(value: object) -> int:
    if not 0 <= whole(value) <= 10_000:
        raise ValueError("a whole number from 0 to 10000")
    return whole(value)


def flag(value: object) -> bool:
    if value not in (0, 1) or not isinstance(value, int):
        raise ValueError("true or false")
    return bool(value)


def kind_of(value: object) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a truth value"}.get(
        type(value), "a number"
    )


def _text(value: object) -> str:
    return kind_of(value) if isinstance(value, dict | list) else json.dumps(value)
