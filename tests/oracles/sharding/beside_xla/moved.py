"""Collectives, and the bytes that a device sends in each of them: the same count for both compilers.

Bytes are those of a ring over n devices, by the size of the result on a device.

    all_reduce        2 (n - 1) / n  of the result         reduce_scatter   n - 1  times the result
    all_gather          (n - 1) / n  of the result         all_to_all       (n - 1) / n  of it
    shift             all of it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# What XLA moves, as jax of some version gave it (in_jax.py).
DATA = Path(__file__).with_name("xla.json")
FORWARD, GRADIENTS = "forward", "with gradients"


class Moved(NamedTuple):
    """A collective: its kind, the devices that meet, the bytes of its result on a device, and those that one sends."""

    kind: str
    members: int
    result: int
    sent: float


def sent(kind: str, members: int, result: int) -> float:
    """Return the bytes that a device sends."""
    of_result = {
        "all_reduce": 2 * (members - 1) / members,
        "reduce_scatter": members - 1,
        "all_gather": (members - 1) / members,
        "all_to_all": (members - 1) / members,
        "shift": 1,
    }
    return of_result[kind] * result


def summed(collectives: Iterable[Moved]) -> dict[str, tuple[int, float]]:
    """Return the number of collectives of each kind, and the bytes that a device sends in them."""
    total: dict[str, tuple[int, float]] = {}
    for one in collectives:
        count, nbytes = total.get(one.kind, (0, 0.0))
        total[one.kind] = (count + 1, nbytes + one.sent)
    return dict(sorted(total.items()))


def bytes_of(total: Mapping[str, Sequence[float]]) -> float:
    """Return the bytes that a device sends in collectives of all kinds."""
    return sum(nbytes for _, nbytes in total.values())
