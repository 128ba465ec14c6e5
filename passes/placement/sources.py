"""Leave out sources: weights, shapes and masks, which take no time, use nothing, and are used in one place.

A source beside its users is no worse off than elsewhere: nothing is waited for, and nothing transferred. So a node that
uses nothing and takes no time on any device is merged into a user when all users are of its colour. A colour of such
nodes is merged into another one when that has all their users. This repeats, as a node that used only merged nodes is
itself a source then. Where memory could be exceeded by it, only colours that take none are merged.
"""

from __future__ import annotations

from dataclasses import replace

from .problem import PlacementProblem, holds


def without_sources(problem: PlacementProblem) -> tuple[PlacementProblem, list[int]]:
    """Return the smaller problem, and for every node of the large one the node of the small one that it is merged
    into."""
    roomy = all(holds(kind, sum(node.memory for node in problem.nodes)) for kind in problem.kinds if kind.count)
    colours: dict[object, int] = {}
    colour_of = [
        colours.setdefault(("own", i) if n.colour is None else n.colour, len(colours))
        for i, n in enumerate(problem.nodes)
    ]
    members: list[list[int]] = [[] for _ in colours]
    for n, colour in enumerate(colour_of):
        members[colour].append(n)
    users: list[set[int]] = [set() for _ in problem.nodes]
    makers: list[set[int]] = [set() for _ in problem.nodes]
    for a, b in problem.edges:
        users[a].add(b)
        makers[b].add(a)
    into: dict[int, int] = {}

    def idle(n: int) -> bool:
        return n not in into and not any(problem.nodes[n].times) and bool(users[n]) and makers[n] <= into.keys()

    changed = True
    while changed:
        changed = False
        for colour, nodes in enumerate(members):
            removable = [n for n in nodes if idle(n) and {colour_of[u] for u in users[n]} == {colour}]
            all_removable = all(idle(n) and (roomy or not problem.nodes[n].memory) for n in nodes)
            if all_removable and len({colour_of[u] for n in nodes for u in users[n]}) == 1:
                removable = nodes
            into |= {n: min(users[n]) for n in removable}
            changed |= bool(removable)
    home = list(range(len(problem.nodes)))
    for n in into:
        while home[n] in into:
            home[n] = into[home[n]]
    remaining = [n for n in range(len(problem.nodes)) if n not in into]
    number = {n: i for i, n in enumerate(remaining)}
    memory = [0.0] * len(problem.nodes)
    for n, node in enumerate(problem.nodes):
        memory[home[n]] += node.memory
    nodes_kept = tuple(replace(problem.nodes[n], memory=memory[n]) for n in remaining)
    edges = tuple((number[a], number[b]) for a, b in problem.edges if a in number and b in number)
    return PlacementProblem(problem.kinds, nodes_kept, edges), [number[n] for n in home]
