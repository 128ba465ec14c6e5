"""The dealing of a batch's microbatches to the ranks of a stage, and how far forwards run ahead of backwards then.

In: for every stage the shares of its ranks. `deal` spreads each rank's microbatches evenly over the batch, so that
ranks with equal shares take turns. Stages with the same shares make the same groups: whole pipelines side by side.

Each rank follows the order that one rank would follow for the whole stage, and leaves out what is not its own. A rank
must have so many forwards in hand that it can work while its microbatch is with the stages behind it. With one rank per
stage that is one microbatch for each stage behind, d-1-s. A rank that runs n of the m microbatches of a batch holds one
for m/n of the time of one. So the microbatch is away for that time at the rank of the next stage, and while that rank
has forwards in hand. `ahead` is the sum of both, for the slowest rank that it shares microbatches with. It is rounded
up to whole microbatches of the rank, that is to a multiple of m/n. Without the rounding two replicas in front of one
would wait for each other's turns: 1.5 times the time.

That is why no rank waits for ever. On rank r, F of microbatch k stands before B of microbatch j if k <= j + ahead(r).
Give a rank that waits to run B(j) the value j, and one that waits to run F(k) the value k - ahead(r). Along the chain
of ranks that wait for each other values never grow: the rank behind is at a microbatch no later. From an F to a B they
shrink. The rank that has not run F(k) yet waits for a B(i) with i < k - ahead. A circle of Bs alone would go to ever
later stages, one of Fs alone to ever earlier ones; so there is no circle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised

Shares = Sequence[Sequence[int]]
Dealt = Sequence[Sequence[Sequence[int]]]


def equal_shares(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Return shares as equal as whole microbatches allow; the first ranks have one more."""
    if ranks > microbatches:
        raise UsageError(
            f"{counted(microbatches, 'microbatch')} per batch cannot be shared out among {ranks} devices",
            hint="give more microbatches, or fewer devices",
        )
    return tuple(microbatches // ranks + (i < microbatches % ranks) for i in range(ranks))


def fair_shares(rates: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """Return shares with which devices of these rates finish at about the same time. Each microbatch goes to the device
    that would finish it first."""
    shares = list(equal_shares(len(rates), min(len(rates), microbatches)))
    for _ in range(microbatches - len(rates)):
        first = min(range(len(rates)), key=lambda j: ((shares[j] + 1) / rates[j], j))
        shares[first] += 1
    return tuple(shares)


def shares_of(given: Sequence[int], ranks: Sequence[int], microbatches: int) -> list[tuple[int, ...]]:
    """Return the shares by stage, from those of all ranks in order. By default they are as equal as possible. `ranks`
    is the number of ranks of each stage."""
    if not given:
        return [equal_shares(count, microbatches) for count in ranks]
    if len(given) != sum(ranks):
        raise UsageError(f"there are shares for {counted(len(given), 'device')}, the stages have {sum(ranks)}")
    shares, listed = [], iter(given)
    for count in ranks:
        shares.append(tuple(next(listed) for _ in range(count)))
    problems = [
        f"the shares {', '.join(map(str, share))} of stage {stage} must be at least 1 each and {microbatches} together"
        for stage, share in enumerate(shares)
        if sum(share) != microbatches or any(n < 1 for n in share)
    ]
    if problems:
        raise UsageError("cannot share the microbatches out:" + itemised(problems))
    return shares


def deal(share: Sequence[int]) -> list[list[int]]:
    """Return the microbatches of a batch, from 0 on, that each rank of a stage runs. Each goes to the rank that is
    furthest behind its share."""
    total, dealt = sum(share), [list[int]() for _ in share]
    for k in range(total):
        rank = max(range(len(share)), key=lambda j: (share[j] * (k + 1) - len(dealt[j]) * total, -j))
        dealt[rank].append(k)
    return dealt


def forwards_ahead(dealt: Dealt) -> list[list[int]]:
    """Return for every stage and rank of it by how many microbatches forwards run ahead of backwards, counted in all
    microbatches."""

    def whole(away: Fraction, own: Sequence[int], total: int) -> int:
        return math.ceil(math.ceil(away * len(own) / total) * Fraction(total, len(own)))

    return _along(dealt[::-1], whole)[::-1]


def weights_behind(dealt: Dealt) -> list[list[int]]:
    """Return for every stage and rank of it how many backwards later the weight gradients of a microbatch may come.
    That is s with one rank per stage."""
    return _along(dealt, lambda away, own, total: math.ceil(away))


def _along(dealt: Dealt, rounded: Callable[[Fraction, Sequence[int], int], int]) -> list[list[int]]:
    """Return for how long a microbatch of a rank is with the stages before it, in times of one microbatch, from the
    first stage on. That is the time on a rank of the stage before plus the result for that rank. The slowest rank that
    it shares microbatches with counts."""
    lags: list[list[int]] = []
    total = sum(map(len, dealt[0]))
    before: list[tuple[set[int], Fraction]] = []
    for ranks in dealt:
        own_numbers = [set(numbers) for numbers in ranks]
        away = [
            max((time for numbers, time in before if not mine.isdisjoint(numbers)), default=Fraction(0))
            for mine in own_numbers
        ]
        lags.append([rounded(time, numbers, total) for time, numbers in zip(away, ranks, strict=True)])
        before = [
            (mine, number + Fraction(total, len(mine))) for mine, number in zip(own_numbers, lags[-1], strict=True)
        ]
    return lags
