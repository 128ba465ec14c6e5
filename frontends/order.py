"""The order of nodes by need: each behind the nodes whose results it takes.

In: what each node needs and makes, by name, in the order of a source. Out: the nodes' numbers in an order in which no
node comes before one that it needs. A node that already lies behind all of these keeps its place. Any other node is
preceded by what it lacks. Names that no node makes are not asked for. Nodes that need each other in a circle are named
by `NeedCircle`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class NeedCircle(Exception):
    """Nodes that need each other: `numbers` lists them, each needing the next one, the last needing the first."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"nodes {', '.join(map(str, numbers))} need each other")
        self.numbers = tuple(numbers)


def order_by_need(needs: Sequence[Collection[str]], makes: Sequence[Collection[str]]) -> list[int]:
    """Order nodes. `needs` and `makes` give each node's names; the first maker of a name counts."""
    maker: dict[str, int] = {}
    for number, names in enumerate(makes):
        for name in names:
            maker.setdefault(name, number)
    before = [[maker[name] for name in dict.fromkeys(names) if name in maker] for names in needs]
    order: dict[int, None] = {}
    for start in range(len(needs)):
        # Nodes that wait for others, each for the next one, with what it has yet to look at.
        waiting = {} if start in order else {start: iter(before[start])}
        while waiting:
            last = next(reversed(waiting))
            lacking = next((number for number in waiting[last] if number not in order), None)
            if lacking is None:
                order[last] = None
                del waiting[last]
            elif lacking in waiting:
                path = list(waiting)
                raise NeedCircle(path[path.index(lacking) :])
            else:
                waiting[lacking] = iter(before[lacking])
    return list(order)
