"""Shared by tests of the report: what they look at, and a browser, or a skip where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import chromium
import small_plan


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> small_plan.Planned:
    return small_plan.plan_in(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    program = chromium.installed()
    if program is None:
        pytest.skip("no Chromium is installed")
    with chromium.Browser(program) as found:
        yield found
