"""What all tests of the runtime share: one thread per process, and bundles of the small classifier."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from oracles.classifier import write_classifier
from oracles.repository import BENCHMARKS

from penstock.backends.bundle.format import Bundle

# Makes failures.py and namespaces.py importable. Last, as some of the modules there have names that tests have, too.
sys.path.append(str(BENCHMARKS))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str, int], Bundle]:
    """bundle_of(stages, schedule, microbatches), made once per session."""
    made: dict[tuple[int, str, int], Bundle] = {}

    def make(stages: int, kind: str, m: int) -> Bundle:
        if (stages, kind, m) not in made:
            made[stages, kind, m] = write_classifier(tmp_path_factory.mktemp(f"{kind}-{stages}-{m}"), stages, kind, m)
        return made[stages, kind, m]

    return make
