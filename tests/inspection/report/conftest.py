"""Fixtures of the tests of the report: its subject, and a browser, or a skip where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import chromium, small_plan


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
