"""Reader for Piper's public profiles of layers: a JSON object with a graph, its layers' options, and equal devices.

    maxMemoryPerDevice   bytes that a device holds             maxDevices   how many there are
    mbsInBatch           microbatches of a batch (maxBatchSize says the same)
    bandwidth            bytes that leave or reach a device in a second
    nodes                id, TMPCs, and perhaps name; TMPCs has a list of options for each tensor parallel degree:
                         id, timePerSample, parameterSize, memoryUsageA (for each microbatch in flight), memoryUsageB,
                         syncTimeFw, syncTimeBw (bytes by the id of the node at the other end of an edge)
    edges                sourceId, destId, communicationCost: bytes

Anything else in an object is for people, and ignored. All problems of a file are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.passes.placement.workload import FieldReader, amount, count, kind_of, whole

from .profiles import JointProblem, LayerOption, LayerProfile

# Bytes in a second; with less, times are no numbers any more.
_SLOWEST = 1e-9
_DEGREE, _ID = re.compile("[1-9][0-9]{0,3}"), re.compile("0|-?[1-9][0-9]{0,18}")
_AMOUNTS = ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB")


@dataclass(frozen=True, slots=True)
class Profiles:
    """A problem read from a file. `ids[i]` is the id of layer i in the file."""

    ids: tuple[int, ...]
    problem: JointProblem


def are_profiles(data: object) -> bool:
    """Return whether the content of a file is in this format: some node has options by tensor parallel degree."""
    nodes = data.get("nodes") if isinstance(data, dict) else None
    return isinstance(nodes, list) and any(isinstance(row, dict) and "TMPCs" in row for row in nodes)


def read_profiles(data: object, where: str = "") -> Profiles:
    """Check the content of a file, and make the problem of it."""
    reader = _ProfileReader()
    profiles = reader.read(data if isinstance(data, dict) else {})
    reader.report(where)
    return profiles


def shortened(text: str) -> str:
    return repr(text if len(text) <= 20 else f"{text[:20]}...")


class _ProfileReader(FieldReader):
    """A reader of profiles."""

    def read(self, data: Mapping[str, object]) -> Profiles:
        memory = self.pick(data, "maxMemoryPerDevice", "", amount, 0.0)
        devices = self.pick(data, "maxDevices", "", count, 1)
        bandwidth = self.pick(data, "bandwidth", "", amount, 1.0)
        batch = "maxBatchSize" if "maxBatchSize" in data and "mbsInBatch" not in data else "mbsInBatch"
        microbatches = self.pick(data, batch, "", whole, 1)
        for name, value, least in (
            ("maxDevices", devices, 1),
            ("bandwidth", bandwidth, _SLOWEST),
            (batch, microbatches, 1),
        ):
            if value < least:
                self.problems.append(f"{name} must be at least {least:g}, got {value:g}")
        ids: list[int] = []
        layers: list[LayerProfile] = []
        for i, row in enumerate(self.rows(data, "nodes")):
            number = self.pick(row, "id", f"nodes[{i}]", whole, None)
            layers.append(self._layer(row, f"nodes[{i}]" if number is None else f"node {number}"))
            ids += [] if number is None else [number]
        self.check_once(ids)
        if not layers:
            self.problems.append("there are no nodes")
        position = {number: i for i, number in enumerate(ids)}
        edges: dict[tuple[int, int], float] = {}
        for i, row in enumerate(self.rows(data, "edges")):
            moved = self.pick(row, "communicationCost", f"edges[{i}]", amount, 0.0)
            ends = self.ends(row, f"edges[{i}]", position)
            if ends is not None and edges.setdefault(ends, moved) != moved:
                self.problems.append(f"edges[{i}] is there twice, with {edges[ends]:g} and {moved:g} bytes")
        if not self.problems:
            self.check_order(ids, list(edges))
            layers = [self._placed(i, layer, ids, position, edges) for i, layer in enumerate(layers)]
        return Profiles(
            tuple(ids), JointProblem(max(1, devices), memory, bandwidth, max(1, microbatches), tuple(layers), edges)
        )

    def _layer(self, row: Mapping[str, object], where: str) -> LayerProfile:
        options: dict[int, tuple[LayerOption, ...]] = {}
        degrees = row.get("TMPCs")
        if not isinstance(degrees, dict):
            self.problems.append(f"{where}: TMPCs must be an object of lists by degree, got {kind_of(degrees)}")
            degrees = {}
        for text in degrees:
            if not _DEGREE.fullmatch(text):
                self.problems.append(f"{where}: TMPCs must have degrees from 1 to 9999, got {shortened(text)}")
                continue
            rows = enumerate(self.rows(degrees, text, f"{where}: TMPCs"))
            options[int(text)] = tuple(self._option(each, f"{where}, degree {text}, option {i}") for i, each in rows)
            names = [option.name for option in options[int(text)]]
            twice = sorted({name for name in names if names.count(name) > 1})
            self.problems += [f"{where}: degree {text} has option {name!r} twice" for name in twice]
        name = row.get("name")
        return LayerProfile(name if isinstance(name, str) else "", options)

    def _option(self, row: Mapping[str, object], where: str) -> LayerOption:
        name = row.get("id")
        if not isinstance(name, str) or not name:
            self.problems.append(f"{where}: id must be text, got {kind_of(name)}")
            name = ""
        time, parameters, saved, fixed = (self.pick(row, key, where, amount, 0.0) for key in _AMOUNTS)
        incoming, outgoing = (self._by_node(row, key, where) for key in ("syncTimeFw", "syncTimeBw"))
        return LayerOption(name, time, parameters, saved, fixed, incoming, outgoing)

    def _by_node(self, row: Mapping[str, object], key: str, where: str) -> dict[int, float]:
        """Return amounts by the ids of nodes. They become positions once all nodes are known."""
        amounts = row.get(key)
        if not isinstance(amounts, dict):
            self.problems.append(f"{where}: {key} must be an object of bytes by node, got {kind_of(amounts)}")
            return {}
        by_node = {}
        for text in amounts:
            if _ID.fullmatch(text):
                by_node[int(text)] = self.pick(amounts, text, f"{where}: {key}", amount, 0.0)
            else:
                self.problems.append(f"{where}: {key} must have ids of nodes, got {shortened(text)}")
        return by_node

    def _placed(
        self,
        layer: int,
        profile: LayerProfile,
        ids: list[int],
        position: Mapping[int, int],
        edges: Mapping[tuple[int, int], float],
    ) -> LayerProfile:
        """Return a layer whose options name others by position. Options must have each edge of it, and no other."""
        makers = {source for source, target in edges if target == layer}
        users = {target for source, target in edges if source == layer}

        def placed(by_id: Mapping[int, float], ends: set[int], key: str, where: str) -> dict[int, float]:
            wanted = {ids[end] for end in ends}
            for number in sorted(wanted ^ by_id.keys()):
                what = "lacks" if number in wanted else "has no edge to or from"
                self.problems.append(f"{where}: {key} {what} node {number}")
            return {position[number]: moved for number, moved in by_id.items() if number in wanted}

        options = {}
        for degree, each in profile.options.items():
            where = f"node {ids[layer]}, degree {degree}"
            options[degree] = tuple(
                replace(
                    option,
                    incoming=placed(option.incoming, makers, "syncTimeFw", f"{where}, option {option.name!r}"),
                    outgoing=placed(option.outgoing, users, "syncTimeBw", f"{where}, option {option.name!r}"),
                )
                for option in each
            )
        return replace(profile, options=options)
