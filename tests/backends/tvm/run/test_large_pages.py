"""Packed operands in large pages: equal to what they are copies of, apart from each other, and given back."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from penstock.backends.tvm.run.large_pages import LEAST, PAGE, LargePages


def test_copies_are_equal_and_lie_apart() -> None:
    pages = LargePages()
    originals = [torch.randn(LEAST // 4 + odd) for odd in (0, 3, 17)] + [torch.randn(500, 800).bfloat16()]
    copies = [pages.copied(x) for x in originals]
    assert all(torch.equal(a, b) for a, b in zip(originals, copies, strict=True))
    assert copies[0].data_ptr() % PAGE == 0
    assert all(x.data_ptr() % 64 == 0 for x in copies)
    ends = [x.data_ptr() + x.nbytes for x in copies]
    assert all(end <= x.data_ptr() for end, x in zip(ends, copies[1:], strict=False))
    # Writing to one leaves the others alone, and the original.
    copies[1].fill_(7.0)
    assert all(torch.equal(originals[i], copies[i]) for i in (0, 2, 3))
    assert not torch.equal(originals[1], copies[1])


def test_small_tensors_stay_where_they_are() -> None:
    small = torch.zeros(LEAST // 4 - 1)
    assert LargePages().copied(small) is small


def test_areas_are_given_back() -> None:
    """Forty copies of 16 MB that nobody keeps, in areas of 32 MB; kept, the last five of them take 80 MB."""
    pages, x = LargePages(), torch.ones(4 << 20)
    before = resident()
    for _ in range(40):
        pages.copied(x)
    assert resident() - before < 80 << 20
    kept = [pages.copied(x) for _ in range(5)]
    assert resident() - before >= sum(x.nbytes for x in kept)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
