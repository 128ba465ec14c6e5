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
from collections.abc import Callable, Iterable, Mapping
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


def load_workload(path: str | Path) -> Workload:
    """Read a workload from a file."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"no JSON: {error}", where=str(path)) from error
    return read_workload(data, str(path))


def read_workload(data: object, where: str = "") -> Workload:
    """Check the content of a file, and make the problem of it."""
    reader = _WorkloadReader()
    workload = reader.read(data)
    if reader.problems:
        shown = itemised(reader.problems[:_SHOWN])
        more = f"\n  - and {len(reader.problems) - _SHOWN} more" if len(reader.problems) > _SHOWN else ""
        raise UsageError(f"the workload has problems:{shown}{more}", where=where)
    return workload


class _WorkloadReader:
    """A reader of a workload, which collects its problems. The result is only valid if there are none."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def read(self, data: object) -> Workload:
        if not isinstance(data, dict):
            self.problems.append(f"expected an object with nodes and edges, got {_kind(data)}")
            data = {}
        limit = self._pick(data, "maxSizePerFPGA", "", _amount, 0.0)
        accelerators = self._pick(data, "maxFPGAs", "", _count, 0)
        cpus = self._pick(data, "maxCPUs", "", _count, 0)
        ids: list[int] = []
        nodes: list[PlacedNode] = []
        for i, row in enumerate(self._rows(data, "nodes")):
            number = self._pick(row, "id", f"nodes[{i}]", _whole, None)
            nodes.append(self._node(row, f"nodes[{i}]" if number is None else f"node {number}"))
            ids += [] if number is None else [number]
        position = {number: i for i, number in enumerate(ids)}
        self.problems += [
            f"node {number} is listed {count} times" for number, count in Counter(ids).items() if count > 1
        ]
        if not nodes:
            self.problems.append("there are no nodes")
        if accelerators + cpus == 0:
            self.problems.append("there are no devices: maxFPGAs and maxCPUs are both 0")
        edges, nodes = self._edges(data, position, nodes)
        if not self.problems:
            self._check_order(ids, nodes, edges)
        kinds = (DeviceKind("accelerator", accelerators, limit), DeviceKind("CPU", cpus, pays_transfers=False))
        return Workload(tuple(ids), PlacementProblem(kinds, tuple(nodes), tuple(edges)))

    def _node(self, row: Mapping[str, object], where: str) -> PlacedNode:
        supported = self._pick(row, "supportedOnFpga", where, _flag, True)
        slow = self._pick(row, "cpuLatency", where, _amount, 0.0)
        fast = self._pick(row, "fpgaLatency", where, _amount, 0.0)
        backward = self._pick(row, "isBackwardNode", where, _flag, False)
        size = self._pick(row, "size", where, _amount, 0.0) if "size" in row else 0.0
        colour = self._pick(row, "colorClass", where, _whole, 0) if row.get("colorClass") is not None else None
        return PlacedNode(where.removeprefix("node "), (fast if supported else inf, slow), size, 0.0, colour, backward)

    def _edges(
        self, data: Mapping[str, object], position: Mapping[int, int], nodes: list[PlacedNode]
    ) -> tuple[list[tuple[int, int]], list[PlacedNode]]:
        costs: dict[int, float] = {}
        edges: list[tuple[int, int]] = []
        for i, row in enumerate(self._rows(data, "edges")):
            first, last = (self._pick(row, key, f"edges[{i}]", _whole, None) for key in ("sourceId", "destId"))
            cost = self._pick(row, "cost", f"edges[{i}]", _amount, 0.0)
            if first is None or last is None:
                continue
            unknown = [end for end in (first, last) if end not in position]
            self.problems += [f"edges[{i}] leads from {first} to {last}, there is no node {end}" for end in unknown]
            if unknown:
                continue
            source = position[first]
            if abs(costs.setdefault(source, cost) - cost) > _SAME_COST:
                self.problems.append(
                    f"edges from node {first} cost {costs[source]:g} and {cost:g}, expected one cost for its output"
                )
            edges.append((source, position[last]))
        return edges, [replace(node, transfer=costs.get(i, 0.0)) for i, node in enumerate(nodes)]

    def _check_order(self, ids: list[int], nodes: list[PlacedNode], edges: list[tuple[int, int]]) -> None:
        for source, target in edges:
            if nodes[source].backward and not nodes[target].backward:
                self.problems.append(f"an edge leads from backward node {ids[source]} to forward node {ids[target]}")
        graph = nx.DiGraph(edges)
        if not nx.is_directed_acyclic_graph(graph):
            around = [ids[source] for source, _ in nx.find_cycle(graph)]
            self.problems.append(f"edges lead round a circle: {' -> '.join(map(str, [*around, around[0]]))}")

    def _rows(self, data: Mapping[str, object], key: str) -> Iterable[Mapping[str, object]]:
        rows = data.get(key)
        if not isinstance(rows, list):
            problem = "is missing" if key not in data else f"must be a list, got {_kind(rows)}"
            self.problems.append(f"{key} {problem}")
            return
        for i, row in enumerate(rows):
            if isinstance(row, dict):
                yield row
            else:
                self.problems.append(f"{key}[{i}] must be an object, got {_kind(row)}")

    def _pick(self, row: Mapping[str, object], key: str, where: str, read: Callable[[object], T], default: D) -> T | D:
        name = f"{where}: {key}" if where else key
        if key not in row:
            self.problems.append(f"{name} is missing")
            return default
        try:
            return read(row[key])
        except ValueError as error:
            self.problems.append(f"{name} must be {error}, got {_text(row[key])}")
            return default


def _amount(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ValueError(f"a number from 0 to {_MOST:g}")
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return value


def _count(value: object) -> int:
    if not 0 <= _whole(value) <= 10_000:
        raise ValueError("a whole number from 0 to 10000")
    return _whole(value)


def _flag(value: object) -> bool:
    if value not in (0, 1) or not isinstance(value, int):
        raise ValueError("true or false")
    return bool(value)


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a truth value"}.get(
        type(value), "a number"
    )


def _text(value: object) -> str:
    return _kind(value) if isinstance(value, dict | list) else json.dumps(value)
