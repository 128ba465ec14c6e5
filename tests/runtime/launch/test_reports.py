"""Tests of reports on their way to rank 0: what they leave behind at the meeting point."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.group.group import RankGroup, host_store
from penstock.runtime.launch.reports import Answers
from penstock.runtime.messages.control import Evaluated

TIMEOUT = 30


@pytest.mark.parametrize("forgets", [True, False])
def test_evaluations_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    """All ranks get the losses of all, and the store keeps those of one evaluation. The control keeps all of them."""
    if not forgets:
        monkeypatch.setattr(RankGroup, "forget", lambda self, key: None)
    store = host_store(2, TIMEOUT)
    groups = [RankGroup(store.clone(), rank, 2, TIMEOUT) for rank in range(2)]
    reports: Any = SimpleNamespace()
    answers = [Answers(reports, None) for _ in groups]

    def evaluate(rank: int, step: int) -> dict[int, float]:
        answers[rank].take(Evaluated({rank: float(step)}), {})
        return answers[rank].losses_of_all(groups[rank], step)

    counts = []
    with ThreadPoolExecutor(2) as threads:
        for step in range(5):
            told = list(threads.map(lambda rank, step=step: evaluate(rank, step), range(2)))
            assert told == [{0: float(step), 1: float(step)}] * 2
            counts.append(store.num_keys())
    assert (counts[-1] == counts[0]) is forgets
