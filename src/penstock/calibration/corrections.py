"""Corrections of estimates: measured over predicted of the work that kernels do on this machine's processor.

They lie in the user's cache folder, one for each run that was graded (grade.py), the last ones only. Estimates for
devices that are this machine are multiplied by their median. Launches, calls of graphs, messages and links are what the
cluster file says.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from statistics import median

from penstock.backends.tvm.fingerprint import key_of
from penstock.ir.cluster.cluster import Device
from penstock.passes.costs.prices import ROOFLINE, InTurn, Prices, Roofline
from penstock.support.cache import Cache, cache_folder
from penstock.support.processor import processor

from .measured import Measured, is_here

# Corrections that are kept.
_KEPT = 20


@dataclass(frozen=True)
class Corrected:
    """A factor that runs on this machine showed the work in estimates to be off by."""

    factor: float
    runs: int

    def of(self, device: Device) -> float:
        return self.factor if is_here(device) else 1.0


def corrected() -> Corrected | None:
    """Return the corrections of this machine, if any were kept."""
    factors = _factors(known_times())
    return Corrected(median(factors.values()), len(factors)) if factors else None


def known_times() -> Cache:
    """Open the table of what was measured on this machine, to be read: that needs no bound of the cache's size."""
    return Cache(cache_folder(), 0, part="times")


def best_prices() -> Prices:
    """Return prices by all that is known on this machine: times of kernels that were measured, else estimates,
    corrected by what runs showed."""
    correction = corrected()
    return InTurn((Measured(store=known_times()),), ROOFLINE if correction is None else Roofline(correction.of))


def keep(store: Cache, run: str, factor: float) -> None:
    """Write down what a run showed, in place of what it showed before."""
    others = [(other, x) for other, x in _factors(store).items() if other != run]
    store.put(_key(), json.dumps({"runs": [*others, (run, factor)][-_KEPT:]}).encode())


def _factors(store: Cache) -> dict[str, float]:
    """Return corrections by run, the oldest first."""
    content = store.get(_key())
    try:
        rows = json.loads(content)["runs"] if content is not None else []
        return {str(run): x for run, x in rows if isinstance(x, float) and math.isfinite(x) and x > 0}
    except (ValueError, KeyError, TypeError):
        return {}


def _key() -> str:
    """Return the key of the entry for plans for TVM: other back ends are not what plans estimate."""
    return key_of("corrections", processor())
