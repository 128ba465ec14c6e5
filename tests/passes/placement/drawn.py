"""Random placement problems, files in the public format, and the optimum by trying every assignment.

`try_all` knows nothing of ideals, units or ties: it gives every colour every device, in all combinations, adds up loads edge by edge, and asks whether
what the edges among forward nodes say of the order of devices has a circle.
"""

from __future__ import annotations

import random
from itertools import product
from math import inf

import numpy as np

from penstock.passes.placement.problem import DeviceKind, PlacedNode, PlacementProblem


def draw_problem(seed: int, most: int = 12) -> PlacementProblem:
    """At most `most` nodes, in about half of the problems with backward nodes; up to four devices of up to three kinds."""
    rng = random.Random(seed)
    kinds = _draw_kinds(rng)
    count = rng.randint(2, most)
    training = rng.random() < 0.5
    forward = rng.randint(max(1, count // 3), count) if training else count
    colours = rng.randint(max(1, forward // 2), forward + 2)
    density = rng.choice((0.15, 0.3, 0.5))
    steps = rng.choice((1.0, 0.25, 0.1))
    nodes: list[PlacedNode] = []
    edges: list[tuple[int, int]] = []
    for i in range(count):
        backward = i >= forward
        colour: int | None = rng.randrange(colours) if rng.random() < 0.4 else 100 + i
        if backward:
            # Its forward node's, one of its own, or none.
            mate = rng.randrange(forward)
            colour = (
                rng.choice((nodes[mate].colour, nodes[mate].colour, 200 + i, None))
                if rng.random() < 0.8
                else nodes[mate].colour
            )
        time = rng.choice((0.0, rng.randint(1, 40) * steps))
        times = tuple(
            inf if rng.random() < 0.08 and kind.name != "CPU" else time * rng.choice((0.5, 1, 2, 10)) for kind in kinds
        )
        nodes.append(
            PlacedNode(
                str(i),
                times,
                float(rng.choice((0, rng.randint(1, 20)))),
                rng.choice((0.0, rng.randint(1, 20) * steps)),
                colour,
                backward,
            )
        )
        first = forward if backward else 0
        edges += [(j, i) for j in range(first, i) if rng.random() < density]
        if backward:
            edges += [(j, i) for j in range(forward) if rng.random() < density / 2]
    return PlacementProblem(kinds, tuple(nodes), tuple(edges))


def _draw_kinds(rng: random.Random) -> tuple[DeviceKind, ...]:
    limit = rng.choice((inf, float(rng.randint(15, 80))))
    first = DeviceKind("accelerator", rng.randint(0, 3), limit)
    if rng.random() < 0.25:
        return (
            first,
            DeviceKind("slow", rng.randint(0, 1), rng.choice((inf, 30.0)), rng.random() < 0.5),
            DeviceKind("CPU", 1, pays_transfers=False),
        )
    return (
        first,
        DeviceKind(
            "CPU", rng.randint(0 if first.count else 1, 4 - first.count if first.count else 2), pays_transfers=False
        ),
    )


def try_all(problem: PlacementProblem, contiguous: bool = True) -> float:
    """The smallest largest load of all placements, infinity where none fits."""
    colours: dict[object, int] = {}
    colour_of = np.array(
        [
            colours.setdefault(("own", i) if n.colour is None else n.colour, len(colours))
            for i, n in enumerate(problem.nodes)
        ]
    )
    kinds = problem.devices
    # One row per assignment. Devices of a kind are equal, so the first colour need not try them all.
    choices = [range(len(kinds))] * len(colours)
    choices[0] = [d for d in range(len(kinds)) if kinds[d] not in kinds[:d]]
    tried = np.array(list(product(*choices)), dtype=np.int8).T
    device_of = tried[colour_of]
    load = np.zeros((len(kinds), device_of.shape[1]))
    memory = np.zeros_like(load)
    for d, kind in enumerate(kinds):
        for i, node in enumerate(problem.nodes):
            here = device_of[i] == d
            load[d][here] += node.times[kind]
            memory[d][here] += node.memory
            users = [b for a, b in problem.edges if a == i]
            if users and problem.kinds[kind].pays_transfers and node.transfer:
                used_here = np.any([device_of[b] == d for b in users], axis=0)
                used_elsewhere = np.any([device_of[b] != d for b in users], axis=0)
                load[d][(here & used_elsewhere) | (~here & used_here)] += node.transfer
    allowed = np.all([memory[d] <= problem.kinds[kind].memory for d, kind in enumerate(kinds)], axis=0)
    if contiguous:
        allowed &= ~_circles(problem, device_of, len(kinds))
    worst = np.where(allowed, load.max(axis=0), inf)
    return float(worst.min())


def _circles(problem: PlacementProblem, device_of: np.ndarray, devices: int) -> np.ndarray:
    """Where the order of devices that the edges ask for has a circle."""
    with_forward = {n.colour for n in problem.nodes if not n.backward}
    orphan = [n.backward and (n.colour is None or n.colour not in with_forward) for n in problem.nodes]
    leads = np.zeros((devices, devices, device_of.shape[1]), dtype=bool)
    everyone = np.arange(device_of.shape[1])
    for a, b in problem.edges:
        if not problem.nodes[b].backward:
            leads[device_of[a], device_of[b], everyone] = True
        elif problem.nodes[a].backward and (orphan[a] or orphan[b]):
            leads[device_of[b], device_of[a], everyone] = True
    for d in range(devices):
        leads[d, d] = False
    for middle in range(devices):
        leads |= leads[:, middle][:, None] & leads[middle][None]
    return np.any([leads[d, d] for d in range(devices)], axis=0)


def try_all_latencies(problem: PlacementProblem) -> float:
    """The smallest latency of all placements of an inference problem, infinity where none fits. Times follow what waits for what, back from the ends."""
    colours: dict[object, int] = {}
    colour_of = [
        colours.setdefault(("own", i) if n.colour is None else n.colour, len(colours))
        for i, n in enumerate(problem.nodes)
    ]
    kinds = problem.devices
    # Of host devices of a kind the first stands for all.
    places = [d for d, k in enumerate(kinds) if problem.kinds[k].pays_transfers or kinds[d] not in kinds[:d]]
    return min(
        (_latency(problem, [chosen[c] for c in colour_of]) for chosen in product(places, repeat=len(colours))),
        default=inf,
    )


def _latency(problem: PlacementProblem, device_of: list[int]) -> float:
    kind_of = [problem.kinds[problem.devices[d]] for d in device_of]
    for d in set(device_of):
        kind = problem.kinds[problem.devices[d]]
        if (
            kind.pays_transfers
            and sum(n.memory for n, where in zip(problem.nodes, device_of, strict=True) if where == d) > kind.memory
        ):
            return inf
    call = [
        {j for j, d in enumerate(device_of) if d == device_of[i]} if kind.pays_transfers else {i}
        for i, kind in enumerate(kind_of)
    ]
    known: dict[frozenset[int], float] = {}

    def end_of(members: frozenset[int], waiting: tuple[frozenset[int], ...]) -> float:
        if members in waiting:
            return inf
        if members not in known:
            takes = sum(problem.nodes[i].times[problem.devices[device_of[i]]] for i in members)
            coming = {a for a, b in problem.edges if b in members and a not in members}
            going = {a for a, b in problem.edges if a in members and b not in members}
            if kind_of[min(members)].pays_transfers:
                takes += sum(problem.nodes[a].transfer for a in coming | going)
            known[members] = takes + max((end_of(frozenset(call[a]), (*waiting, members)) for a in coming), default=0.0)
        return known[members]

    return max(end_of(frozenset(members), ()) for members in call)


def as_file(problem: PlacementProblem) -> dict[str, object]:
    """The problem in the public format; its kinds must be those of the format."""
    accelerator, cpu = problem.kinds
    nodes = []
    for i, node in enumerate(problem.nodes):
        row: dict[str, object] = {
            "id": 10 + 3 * i,
            "name": f"n{i}",
            "supportedOnFpga": int(node.times[0] < inf),
            "cpuLatency": node.times[1],
        }
        row |= {"fpgaLatency": min(node.times[0], 1e6), "isBackwardNode": int(node.backward), "size": node.memory}
        nodes.append(row if node.colour is None else row | {"colorClass": node.colour})
    edges = [
        {"sourceId": 10 + 3 * a, "destId": 10 + 3 * b, "cost": problem.nodes[a].transfer} for a, b in problem.edges
    ]
    limit = accelerator.memory if accelerator.memory < inf else 1e18
    return {
        "maxSizePerFPGA": limit,
        "maxFPGAs": accelerator.count,
        "maxCPUs": cpu.count,
        "nodes": nodes,
        "edges": edges,
    }
