"""Lower bounds on the value of any placement: reported beside a value that is not proven to be the optimum.

Here work may be split at will, even within a node, and nothing is transferred. With y[u, k] the part of unit u that is
on devices of kind k,

    least b:  sum over k of y[u, k] = 1
              sum over u of times[u][k] y[u, k] <= count[k] b
              sum over u of memory[u] y[u, k] <= count[k] memory[k]

a linear programme. The second bound: some device has the unit that takes longest even where it is fastest.
"""

from __future__ import annotations

from math import inf

from penstock.support.errors import DoesNotFit
from penstock.support.words import exact_bytes, itemised

from .problem import PlacementProblem, holds
from .programme import Programme
from .units import Units


def lower_bound(units: Units) -> float:
    """Return the larger of the two bounds."""
    heaviest = max((min(times) for times in units.times), default=0.0)
    if len(units.kinds) == 1:
        return max(heaviest, sum(times[0] for times in units.times) / units.kinds[0].count)
    return max(heaviest, _spread(units))


def _spread(units: Units) -> float:
    programme = Programme()
    level = programme.variable()
    share = {
        (u, k): programme.variable(0.0, 1.0)
        for u, times in enumerate(units.times)
        for k, kind in enumerate(units.kinds)
        if times[k] < inf and holds(kind, units.memory[u])
    }
    for u in range(len(units)):
        programme.row(((share[u, k], 1.0) for k in range(len(units.kinds)) if (u, k) in share), least=1.0, most=1.0)
    held = max(1.0, sum(units.memory))
    for k, kind in enumerate(units.kinds):
        mine = [(u, y) for (u, at), y in share.items() if at == k]
        programme.row([*((y, units.times[u][k]) for u, y in mine), (level, -float(kind.count))], most=0.0)
        if kind.memory * kind.count < held:
            programme.row(((y, units.memory[u] / held) for u, y in mine), most=kind.count * kind.memory / held)
    # The solver meets rows to a millionth.
    return max(0.0, programme.minimise().bound) * (1 - 1e-6)


def check_room(problem: PlacementProblem, units: Units) -> None:
    """Raise DoesNotFit where no placement can exist for plain reasons: nodes that fit on no device, or more bytes than
    all devices hold."""
    problems = []
    for times, memory, nodes in zip(units.times, units.memory, units.nodes, strict=True):
        lost = [problem.nodes[n] for n in nodes]
        lost = [
            node
            for node in lost
            if all(time == inf for time, kind in zip(node.times, problem.kinds, strict=True) if kind.count)
        ]
        if lost:
            problems += [f"node {node.name} is supported by no device" for node in lost]
        elif not any(time < inf and holds(kind, memory) for kind, time in zip(units.kinds, times, strict=True)):
            names = ", ".join(problem.nodes[n].name for n in nodes[:5]) + (", ..." if len(nodes) > 5 else "")
            problems.append(
                f"{names}: {exact_bytes(round(memory))} that must be on one device, and none can run them and has "
                "the room"
            )
    held, room = sum(units.memory), sum(kind.count * kind.memory for kind in units.kinds)
    if held > room * (1 + 1e-12):
        problems.append(f"all nodes take {exact_bytes(round(held))}, all devices have {exact_bytes(round(room))}")
    if problems:
        raise DoesNotFit("no placement fits:" + itemised(problems[:20]), hint="add devices or memory")
