"""The prices of the fates that a training has to choose from: seconds of a batch, and bytes of each device.

In: the plans that were tried. Out: lines for people, and the same as plain data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.passes.costs.prices import shown_seconds
from penstock.planning.choice import compare
from penstock.support.words import shown_bytes

# What each setting of `--offload` moves, in words.
_MOVED = {
    "state": "moving optimiser state",
    "activations": "moving what forwards saved",
    "both": "moving optimiser state and what forwards saved",
    "weights": "moving weights and their state",
    "all": "moving weights, their state and what forwards saved",
}


@dataclass(frozen=True, slots=True)
class FatePrice:
    """The price of a plan with these settings of `--offload` and `--recompute`.

    `step` are predicted seconds of a batch, None where there is no such plan. `needs` are bytes at the worst moment, by
    device: of a plan that does not fit, of those devices that are too small. `again` says whether something is computed
    again, `refused` why nothing of this kind can be moved, or what else is too small than a device.
    """

    offload: str
    recompute: str
    step: float | None
    needs: Mapping[str, int]
    again: bool = False
    refused: str = ""

    @property
    def words(self) -> str:
        """Say what the plan does, as in `fits by ...`."""
        parts = [_MOVED[self.offload]] if self.offload in _MOVED else []
        parts += ["recomputing"] if self.again else []
        return " and ".join(parts) or "keeping everything"

    def as_dict(self) -> dict[str, Any]:
        return {
            "offload": self.offload,
            "recompute": self.recompute,
            "recomputes": self.again,
            "step_s": self.step,
            "needs": dict(self.needs),
            **({"refused": self.refused} if self.refused else {}),
        }


@dataclass(frozen=True, slots=True)
class FatePrices:
    """The prices of all plans that were tried, and the one that was chosen. `limits` are the bytes of devices. `free`
    keeps everything, on devices without a limit."""

    limits: Mapping[str, int]
    free: FatePrice
    tried: Sequence[FatePrice]
    chosen: FatePrice | None = None

    def lines(self) -> Iterator[str]:
        """Yield the argument for what was chosen: what fits, the fastest first, and what does not."""
        least = f"; {self._short_of(self.free)}" if self._shortage(self.free) > 1 else ""
        yield f"offload: {shown_seconds(self.seconds_free)} per batch with everything kept{least}"
        fitting = self._fitting()
        for price in fitting:
            assert price.step is not None
            by = f"by {price.words}" if price.offload != "none" or price.again else "with everything kept"
            chosen = "; chosen" if price == self.chosen else ""
            yield f"offload: fits {by}: {compare(price.step, self.seconds_free)}{chosen}"
        kinds = {price.offload for price in fitting}
        yield from (f"offload: {line}" for line in self.shortages(kinds))

    def shortages(self, fitting: set[str]) -> Iterator[str]:
        """Yield for each kind that has no fitting plan the least that it needs, or why there is no plan."""
        for kind in dict.fromkeys(price.offload for price in self.tried):
            failed = [price for price in self.tried if price.offload == kind]
            if kind in fitting:
                continue
            short = [price for price in failed if price.needs]
            if short:
                price = min(short, key=self._shortage)
                yield f"does not fit by {price.words}: {self._short_of(price)}"
            elif refusal := next((price for price in failed if not price.again), failed[0]).refused:
                yield f"no plan by {_MOVED.get(kind, failed[0].words)}: {refusal}"

    def least_needs(self) -> Mapping[str, int]:
        """Return the bytes by device that would be enough for the plan that is nearest to fitting."""
        return min((price.needs for price in self.tried if price.needs), key=self._shortage_of, default={})

    @property
    def seconds_free(self) -> float:
        """The seconds of a batch where no memory has a limit."""
        assert self.free.step is not None
        return self.free.step

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain data, each plan that was tried by itself."""
        return {
            "limits": dict(self.limits),
            "everything_kept": self.free.as_dict(),
            "tried": [price.as_dict() | {"chosen": price == self.chosen} for price in self.tried],
        }

    def _fitting(self) -> list[FatePrice]:
        """Return the fastest of the plans that fit and do the same, the fastest first; of its kind the chosen one."""
        best: dict[str, FatePrice] = {}
        for price in self.tried:
            if price.step is not None:
                known = best.get(price.words)
                if known is None or known.step is None or price.step < known.step:
                    best[price.words] = price
        if self.chosen is not None:
            best[self.chosen.words] = self.chosen
        return sorted(best.values(), key=lambda price: price.step or 0.0)

    def _shortage(self, price: FatePrice) -> float:
        return self._shortage_of(price.needs)

    def _shortage_of(self, needs: Mapping[str, int]) -> float:
        """Return how many times the memory of its device a plan needs, of the device that is worst off."""
        return max((need / self.limits[name] for name, need in needs.items() if name in self.limits), default=0.0)

    def _short_of(self, price: FatePrice) -> str:
        name = max(
            (name for name in price.needs if name in self.limits),
            key=lambda name: price.needs[name] / self.limits[name],
        )
        return f"{name} would need {shown_bytes(price.needs[name])}, it has {shown_bytes(self.limits[name])}"
