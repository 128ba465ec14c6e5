"""Compiled stages of these tests are not kept, and run on one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TVM_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def _no_cache() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", "off")
        yield
