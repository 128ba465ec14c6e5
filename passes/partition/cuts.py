"""Search for the cuts of a chain into stages, by dynamic programmes over its operations.

Schedules differ in what messages cost. Where the pipeline drains after each batch, a stage waits for what it receives:
the bottleneck is the largest sum of x, the seconds of a microbatch on a stage, and c, the transfers in front of it.
Where it never drains (2bw, eager-2bw), messages travel during computations, and work on variables is a part of x. Then,
with the loads l of links, and k forwards in hand for each stage behind (the eagerness of the schedule), a microbatch
takes

    max over  x_s,  l_s,  and for all stages p < q  (x_p + .. + x_q + c_p+1 + .. + c_q) / (1 + k (q - p))

as passes/planner/cost.py has it. The last term is the round trip that so many forwards in hand wait for. The worst one
is below T where A_s = max(x_s - T, A_s-1 + c_s + x_s - k T) is nowhere above 0. So a dynamic programme keeps the
smallest A of every prefix, and T is found by bisection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np
import numpy.typing as npt

from penstock.ir.graph import Op
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised, meant

from .chain import module_spans, moving_spans, positions_of
from .chain_costs import ChainCosts
from .memory import StageNeeds

Array = npt.NDArray[np.float64]

# The part of a bound to which bisection finds it.
_TOLERANCE = 1e-3
# The most variables that an error names.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CutSearch:
    """A search for `count` stages. Those after the first start at the operations that `only_at` names, if any. `needs`
    is what memory costs. `eagerness` is 0 where messages are waited for, else the forwards in hand for each stage
    behind. `pins` are operations that are on a stage: the first one, the last one, and the stage."""

    costs: ChainCosts
    count: int
    only_at: Sequence[str] = ()
    needs: StageNeeds | None = None
    eagerness: int = 0
    pins: tuple[tuple[int, int, int], ...] = ()
    pin_texts: tuple[str, ...] = ()

    def best(self) -> list[int]:
        """Return the first operation of every stage, or nothing where no choice fits into memory."""
        cuts = self.best_at_all()
        if not cuts and self.needs is None:
            raise self.no_cuts()
        return cuts

    def no_cuts(self) -> UsageError:
        """Return the error that names all that leaves too few places for stages to start at."""
        chain = self.costs.chain
        reasons = ["only some places are open"] if self.only_at else []
        for text, (first, last, stage) in zip(self.pin_texts, self.pins, strict=True):
            reason = f"{text!r} pins operations {first} to {last} of {len(chain)}"
            if first < stage:
                reason += f", with {first} in front of them for {counted(stage, 'earlier stage')}"
            if len(chain) - 1 - last < self.count - 1 - stage:
                behind = counted(self.count - 1 - stage, "later stage")
                reason += f", with {len(chain) - 1 - last} behind them for {behind}"
            reasons.append(reason)
        kept = [f"@{name}" for name, (first, last) in moving_spans(chain).items() if last > first]
        if kept:
            more = f" and {len(kept) - _SHOWN} others" if len(kept) > _SHOWN else ""
            reasons.append(f"what reads and writes {', '.join(kept[:_SHOWN])}{more} is on one stage")
        return UsageError(
            f"{self.count} stages cannot all start at the places that are given:" + itemised(reasons),
            hint="ask for fewer stages, or leave more places open",
        )

    def best_at_all(self) -> list[int]:
        """Return the first operation of every stage, or nothing where there is no choice."""
        cuts = self._least_bottleneck()
        if not cuts or not self.eagerness:
            return cuts
        stages = by_operation(cuts, len(self.costs.chain))
        low, high = max(self._parts(stages)), self.step(stages)
        while high - low > _TOLERANCE * high:
            bound = (low + high) / 2
            better = self._below(bound)
            if not better:
                low = bound
                continue
            cuts, high = better, min(bound, self.step(by_operation(better, len(self.costs.chain))))
        return cuts

    def step(self, stages: Sequence[int]) -> float:
        """Return the seconds of a microbatch, where every operation has a stage."""
        spent = [self._of_stage(s, stages) for s in range(self.count)]
        if not self.eagerness:
            return max(computed + transfer for computed, transfer in spent)
        slowest = max(self._parts(stages))
        for p in range(self.count):
            total = spent[p][0]
            for q in range(p + 1, self.count):
                total += sum(spent[q])
                slowest = max(slowest, total / (1 + self.eagerness * (q - p)))
        return slowest

    def _of_stage(self, stage: int, stages: Sequence[int]) -> tuple[float, float]:
        computed, transfer = self.costs.of_stage(stage, stages)
        if self.eagerness:
            computed += float(self.costs.besides[stage][np.equal(stages, stage)].sum())
        return computed + (extra_seconds(self.needs, stage, stages) if self.needs is not None else 0.0), transfer

    def slowest(self, stages: Sequence[int]) -> int:
        """Return the stage that takes longest, with the transfers in front of it."""
        return max(range(self.count), key=lambda stage: sum(self._of_stage(stage, stages)))

    def _parts(self, stages: Sequence[int]) -> list[float]:
        """Return the seconds of stages, and the loads of links."""
        parts = [self._of_stage(s, stages)[0] for s in range(self.count)]
        return parts + [self.costs.load(s, stages) for s in range(1, self.count)]

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each stage where it may start."""
        chain = self.costs.chain
        allowed = np.full((self.count, len(chain) + 1), not self.only_at)
        if self.only_at:
            position = known_positions(chain, self.only_at)
            allowed[:, [position[name] for name in self.only_at]] = True
        for first, last in moving_spans(chain).values():
            allowed[:, first + 1 : last + 1] = False
        for first, last, stage in self.pins:
            allowed[: stage + 1, first + 1 :] = False
            allowed[stage + 1 :, : last + 1] = False
        return allowed

    def _seconds(self) -> Iterator[tuple[int, list[Array]]]:
        """Yield for every end of a range the seconds of each stage for ranges that begin at 0, 1, ... and end there."""
        before = self.costs.steady if self.eagerness else self.costs.before
        rows: Iterable[list[Array] | None]
        rows = repeat(None, len(self.costs.chain)) if self.needs is None else self.needs.rows()
        for j, more in enumerate(rows, 1):
            plain = [before[s][j] - before[s][:j] for s in range(self.count)]
            yield j, plain if more is None else [a + b for a, b in zip(plain, more, strict=True)]

    def _least_bottleneck(self) -> list[int]:
        """Return cuts with the smallest bottleneck, without round trips. best[s, j] is that of the first j operations
        over stages 0 .. s."""
        n, allowed = len(self.costs.chain), self.allowed()
        best, choice = self._table()
        for j, seconds in self._seconds():
            best[0, j] = seconds[0][0]
            for stage in range(1, min(self.count, j)):
                starts = slice(stage, j)
                if self.eagerness:
                    load = np.maximum(seconds[stage][starts], self.costs.loads[stage][starts])
                else:
                    load = seconds[stage][starts] + self.costs.transfer[stage][starts]
                bottleneck = np.maximum(best[stage - 1, starts], np.where(allowed[stage][starts], load, np.inf))
                k = int(np.argmin(bottleneck))
                best[stage, j], choice[stage, j] = bottleneck[k], stage + k
        return _followed(choice, n) if np.isfinite(best[-1, n]) else []

    def _below(self, bound: float) -> list[int]:
        """Return cuts of which no stage, load or round trip takes longer than the bound; nothing where there are none.
        worst[s, j] is the smallest A of the first j operations over stages 0 .. s."""
        n, allowed = len(self.costs.chain), self.allowed()
        worst, choice = self._table()
        for j, seconds in self._seconds():
            worst[0, j] = seconds[0][0] - bound
            for stage in range(1, min(self.count, j)):
                starts = slice(stage, j)
                alone = seconds[stage][starts] - bound
                behind = worst[stage - 1, starts] + self.costs.transfer[stage][starts] + seconds[stage][starts]
                fine = allowed[stage][starts] & (self.costs.loads[stage][starts] <= bound)
                over = np.where(fine, np.maximum(alone, behind - self.eagerness * bound), np.inf)
                k = int(np.argmin(over))
                worst[stage, j], choice[stage, j] = over[k], stage + k
            column = worst[:, j]
            column[column > 0] = np.inf
        return _followed(choice, n) if np.isfinite(worst[-1, n]) else []

    def _table(self) -> tuple[Array, npt.NDArray[np.int64]]:
        shape = self.count, len(self.costs.chain) + 1
        return np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)


def by_operation(cuts: Sequence[int], count: int) -> list[int]:
    """Return the stage of every operation."""
    return [s for s, (a, b) in enumerate(pairwise([*cuts, count])) for _ in range(a, b)]


def extra_seconds(needs: StageNeeds, stage: int, stages: Sequence[int]) -> float:
    """Return the seconds that memory costs a stage."""
    return needs.extra(stage, {i for i, of in enumerate(stages) if of == stage})


def _followed(choice: npt.NDArray[np.int64], count: int) -> list[int]:
    """Return the first operation of every stage, from the last stage on."""
    cuts = [count]
    for stage in reversed(range(1, len(choice))):
        cuts.append(int(choice[stage, cuts[-1]]))
    return [0, *reversed(cuts[1:])]


def given_cuts(costs: ChainCosts, split_at: Sequence[str]) -> list[int]:
    """Return the operations that the user named as the first ones of stages."""
    position = known_positions(costs.chain, split_at)
    problems, starts, spans = [], {0: "the first operation of the model"}, moving_spans(costs.chain)
    for name in split_at:
        cut = position[name]
        if cut in starts:
            again = "is given twice" if starts[cut] == repr(name) else f"names the same operation as {starts[cut]}"
            problems.append(f"{name!r} {again}")
        apart = [variable for variable, (first, last) in spans.items() if first < cut <= last]
        if apart:
            problems.append(f"before {name!r} @{apart[0]} is read, and behind it written: it can be on one stage only")
        starts.setdefault(cut, repr(name))
    if problems:
        raise UsageError("cannot split there:" + itemised(problems))
    return sorted(starts)


def pins_of(chain: Sequence[Op], texts: Sequence[str], count: int) -> tuple[tuple[int, int, int], ...]:
    """Return the operations of nodes, values and modules that are given a stage, `NAME=STAGE`: the first, the last, and
    the stage."""
    spans, position = module_spans(chain), positions_of(chain)
    pins, problems = dict[str, tuple[int, int, int]](), list[str]()
    for text in texts:
        name, _, number = (part.strip() for part in text.rpartition("="))
        places = [i for i, op in enumerate(chain) if op.loc == name] if name else []
        places = [*places, *spans.get(name, ())] or ([position[name]] if name in position else [])
        if not number.isdecimal() or int(number) >= count:
            problems.append(f"{text!r} does not end in a stage from 0 to {count - 1}")
        elif not places:
            hint = meant(name, {*position, *spans})
            problems.append(f"{text!r} names no value, node or module" + f", {hint}" * bool(hint))
        else:
            pins[text] = min(places), max(places), int(number)
    problems += [
        f"{behind!r} begins before {text!r} ends"
        for text, (_, last, stage) in pins.items()
        for behind, (first, _, later) in pins.items()
        if later > stage and first <= last
    ]
    if problems:
        raise UsageError("cannot pin to stages:" + itemised(problems))
    return tuple(pins.values())


def known_positions(chain: Sequence[Op], names: Sequence[str]) -> dict[str, int]:
    """Return the operation that each name stands for, of a module its first one; names that stand for none are
    refused."""
    position = positions_of(chain)
    unknown = [name for name in names if name not in position]
    if unknown:
        listed = "with `--dump-ir dumps`, `penstock inspect dumps/00_input.ir --op .` lists those there are"
        raise UsageError(
            f"no value, node or module named {', '.join(map(repr, unknown))} to split at",
            hint=" ".join(filter(None, [*(meant(name, position) for name in unknown[:1]), listed])),
        )
    return position
