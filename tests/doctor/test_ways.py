"""The way to the disk: measured once for plans without a cluster file, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.doctor import examine, ways
from penstock.doctor.examine import HostFacts, cluster_of
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import FILE, SPACE_WAYS, Space
from penstock.support.cache import Cache, cache_folder
from penstock.support.errors import PenstockError

pytestmark = pytest.mark.usefixtures("own_cache")
CLUSTER = Cluster.local(1)


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RATES", "measured")
    monkeypatch.setattr(ways, "_MOVED", 1 << 20)


def test_a_way_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    space = Space("disk", path=str(tmp_path))
    (first,) = ways.with_measured_way(CLUSTER, space, said.append).spaces
    assert first.path == str(tmp_path)
    assert first.bandwidth not in (0.0, SPACE_WAYS[FILE][0])
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    # Bytes by seconds: half the time is twice the bandwidth, but what was kept is not measured again.
    monkeypatch.setattr(ways, "_seconds", lambda space: 2.0**-10)
    assert ways.with_measured_way(CLUSTER, space, said.append).spaces == (first,)
    assert len(said) == 1
    store = Cache(cache_folder(), 1 << 20, part="rates")
    monkeypatch.setattr(ways, "Cache", lambda *_, **__: store)
    monkeypatch.setattr(store, "get", lambda key: b"not a number")
    assert ways.with_measured_way(CLUSTER, space, said.append).spaces[0].bandwidth == float(f"{2.0**30:.3g}")


def test_control_what_cannot_or_shall_not_be_measured_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    nowhere = Space("disk", path=str(tmp_path / "nowhere"))
    assert ways.with_measured_way(CLUSTER, nowhere, said.append).spaces == (nowhere,)
    assert "could not be measured" in said[-1]
    monkeypatch.setenv("PENSTOCK_RATES", "assumed")
    monkeypatch.setattr(ways, "_seconds", lambda space: pytest.fail("it was measured"))
    here = Space("disk", path=str(tmp_path))
    assert ways.with_measured_way(CLUSTER, here, said.append).spaces == (here,)


def test_a_disk_that_cannot_be_measured_is_told_and_one_in_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []

    def full(space: object) -> float:
        raise PenstockError("the disk is full")

    monkeypatch.setattr(examine, "in_memory", lambda folder: "")
    assert examine._measured_disk(lambda text: None, problems) is not None
    monkeypatch.setattr(examine, "measured_bandwidth", full)
    assert examine._measured_disk(lambda text: None, problems) is None
    assert ["could not be measured: the disk is full" in problem for problem in problems] == [True]
    monkeypatch.setattr(examine, "in_memory", lambda folder: "tmpfs")
    assert examine._measured_disk(lambda text: None, problems) is None
    assert len(problems) == 1


def test_each_host_has_its_own_disk() -> None:
    plain = [{"name": "cpu:0", "fields": CLUSTER.devices[0].fields(), "spaces": {}}]
    hosts = [
        HostFacts(name, "", {}, "", 4, None, {}, 1 << 34, None, plain, None, None, [], disk=rate)
        for name, rate in (("a", 1e9), ("b", None), ("c", 2e9))
    ]
    assert [(space.host, space.bandwidth) for space in cluster_of(hosts, {}).spaces] == [("a", 1e9), ("c", 2e9)]
    assert [(space.host, space.bandwidth) for space in cluster_of(hosts[:1], {}).spaces] == [("", 1e9)]
