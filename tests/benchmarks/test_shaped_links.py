"""The benchmark of shaped links states what it shapes: the cluster file has the rates of the cards, and a run is compared with its own prediction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

from penstock.ir.cluster.cluster import Cluster

sys.path.insert(0, str(BENCHMARKS))

from namespaces import available
from shaped_links import PAYLOAD, SKIPPED, cluster_file

SCRIPT = BENCHMARKS / "shaped_links.py"


def test_the_cluster_file_states_the_cards(tmp_path: Path) -> None:
    cluster = Cluster.load(cluster_file(tmp_path, 25e6))
    assert [device.host for device in cluster.devices] == ["n1", "n2", "n3", "n4"]
    path = cluster.path("cpu:1", "cpu:2")
    assert path.bandwidth == pytest.approx(25e6 * PAYLOAD)
    # What leaves a host shares its card, in each direction by itself.
    shared = {name for name, _ in path.shares}
    assert shared & {name for name, _ in cluster.path("cpu:1", "cpu:0").shares}
    assert not shared & {name for name, _ in cluster.path("cpu:2", "cpu:1").shares}


@pytest.mark.slow
@pytest.mark.skipif(bool(available()), reason=f"no network namespaces: {available()}")
def test_a_run_through_slow_cards(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--rates", "25", "--schedules", "1f1b", "--steps", "5", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert report.exists(), done.stderr
    (line,) = json.loads(report.read_text())["lines"]
    assert len(line["times"]) == 5 - SKIPPED
    # 8 messages of 1 MB each way leave a host in the middle; the bucket lets no more through.
    assert min(line["predicted_s"], *line["times"]) > 16 * 2**20 / 25e6
    assert done.stdout.count("\n| ") == 2
