"""The executor of schedules by brute force, as a fixture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .brute import Wrong, recurrence, run


@pytest.fixture(scope="session")
def brute():
    return SimpleNamespace(run=run, recurrence=recurrence, Wrong=Wrong)
