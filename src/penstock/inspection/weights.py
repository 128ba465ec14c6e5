"""Statistics of weights.

In: named arrays, of a bundle or a checkpoint. Out: Statistics of each, in one pass over its elements in float64.

    mean, std, norm    of the finite elements; std is that of the elements themselves (divided by their number), norm
                       the root of the sum of squares
    zeros              elements equal to 0
    nans, infinities   elements that are no numbers

Means and squares are summed up part by part and joined by Chan, Golub and LeVeque's formula. So a large mean does not
swallow a small spread. Arrays are mapped into memory and read in parts: a file may be larger than memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.ir.graph import Module
from penstock.support.errors import VerifyError
from penstock.support.words import itemised

# Elements of a part: twice as many float64 values fit into the cache of a core.
_PART = 1 << 15


@dataclass(frozen=True)
class Statistics:
    """The statistics of one array. Without finite elements it has no least, most, mean and std."""

    count: int
    least: float | None
    most: float | None
    mean: float | None
    std: float | None
    norm: float
    zeros: int
    nans: int
    infinities: int

    @property
    def share_of_zeros(self) -> float:
        return self.zeros / self.count if self.count else 0.0


def statistics(array: npt.NDArray[Any]) -> Statistics:
    """Compute statistics in one pass over an array of any element type: each part is read once and
    stays in the cache.
    """
    number, mean, spread = 0, 0.0, 0.0
    least, most, zeros, nans, infinities = math.inf, -math.inf, 0, 0, 0
    for part in _parts(array):
        low, high = float(part.min()), float(part.max())
        zeros += part.size - int(np.count_nonzero(part))
        # Elements that are no numbers show in the least and the most: nan is both where there is one.
        if not (math.isfinite(low) and math.isfinite(high)):
            not_a_number = int(np.isnan(part).sum())
            finite = part[np.isfinite(part)]
            nans, infinities = nans + not_a_number, infinities + part.size - finite.size - not_a_number
            if not finite.size:
                continue
            part, low, high = finite, float(finite.min()), float(finite.max())
        with np.errstate(over="ignore"):
            part_mean = float(part.mean())
            distance, total = part_mean - mean, number + part.size
            around = part - part_mean
            spread += float(around @ around) + distance * distance * number * part.size / total
        mean, number = mean + distance * part.size / total, total
        least, most = min(least, low), max(most, high)
    # The sum of squares is the one around the mean plus that of the mean.
    others: dict[str, Any] = {
        "norm": math.sqrt(spread + number * mean * mean),
        "zeros": zeros,
        "nans": nans,
        "infinities": infinities,
    }
    if not number:
        return Statistics(int(array.size), None, None, None, None, **others)
    return Statistics(int(array.size), least, most, mean, math.sqrt(spread / number), **others)


def _parts(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.float64]]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _PART):
        yield np.asarray(flat[start : start + _PART]).astype(np.float64)


# ------------------------------------------------------------------------------------------------ sources of arrays


def checkpoint_arrays(path: str | Path, module: Module) -> tuple[dict[str, npt.NDArray[Any]], int]:
    """Return the newest state of a checkpoint, or of the newest one of a directory, and its step.

    Optimiser state and buffers are included. VerifyError is raised where it has other variables.
    """
    from penstock.runtime.checkpoint.finding import find_checkpoint  # lazy: heavy
    from penstock.runtime.checkpoint.format import read_index, read_tensors  # lazy: heavy

    place = find_checkpoint(Path(path))
    index = read_index(place)
    problems = list(_strangers(index.types(index.step), module))
    if problems:
        raise VerifyError("the checkpoint is of another program:" + itemised(problems), where=str(place))
    return read_tensors(place, index, set(index.types(index.step))), index.step


def _strangers(types: Mapping[str, str], module: Module) -> Iterator[str]:
    for name, type_text in types.items():
        if name not in module.vars:
            yield f"{name}: the program has no such variable"
        elif str(module.vars[name].type.plain) != type_text:
            yield f"{name}: the program has {module.vars[name].type.plain}, the checkpoint {type_text}"
