"""A cache of compiled kernels that a test has for itself."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache of this test's own."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tvm"
