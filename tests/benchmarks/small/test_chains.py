"""The benchmark of chains: what it plans with and without a chain, and what is predicted of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

from penstock.ir.schedule import HANDS

sys.path.insert(0, str(BENCHMARKS))

from chains import LEAST, MOST, NBYTES, RATE, planned, predicted
from namespaces import available
from shaped_links import PAYLOAD


@pytest.mark.parametrize("chain", [True, False])
def test_a_chain_is_predicted_to_take_little_more_than_one_copy(chain: bool, tmp_path: Path) -> None:
    """The control sends one by one, as the busiest card says: three copies leave it."""
    plan = planned(tmp_path, chain=chain)
    assert sum(action.kind in HANDS for action in plan.module.schedule.actions()) == (2 if chain else 0)
    copies = predicted(plan) / (NBYTES / (RATE * PAYLOAD))
    assert copies <= MOST if chain else copies >= LEAST


@pytest.mark.slow
@pytest.mark.skipif(bool(available()), reason=f"no network namespaces: {available()}")
def test_a_run_on_slow_cards(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [sys.executable, str(BENCHMARKS / "chains.py"), "--json", str(report)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert report.exists(), done.stderr
    chain, apart = json.loads(report.read_text())["rows"]
    # The bucket lets no more through.
    assert chain["copies"] > 0.95
    assert apart["copies"] > 2.7
