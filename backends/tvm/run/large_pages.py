"""Memory in large pages for operands that every call reads as a whole: fewer addresses to look up, and times that
depend less on where small pages happen to lie.

In: tensors, one by one. Out: copies that lie behind each other, in areas for which the system is asked for large pages.
An area is given back when none of its copies is used any more. Where the system has no large pages, it has small ones.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PAGE = 2 << 20
# Smaller tensors stay where they are.
LEAST = 256 << 10
_AREA = 32 << 20
# Copies begin at multiples of this.
_LINE = 64


class LargePages:
    """The area that copies are put into, the current one of several."""

    def __init__(self) -> None:
        self._area: torch.Tensor | None = None
        self._used = 0

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in large pages, or the tensor itself if it is small."""
        if x.nbytes < LEAST or not x.is_cpu:
            return x
        if self._area is None or self._used + x.nbytes > len(self._area):
            self._area, self._used = _area(max(x.nbytes, _AREA)), 0
        place = self._area[self._used : self._used + x.nbytes].view(x.dtype).view(x.shape)
        self._used += -(-x.nbytes // _LINE) * _LINE
        return place.copy_(x)


def _area(size: int) -> torch.Tensor:
    """Return fresh memory that begins and ends with a large page."""
    import torch  # lazy: heavy

    size = -(-size // PAGE) * PAGE
    area = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels may be built without large pages.
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    skipped = -whole.data_ptr() % PAGE
    return whole[skipped : skipped + size]
