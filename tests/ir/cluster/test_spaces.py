"""Memory spaces beside those of devices, and ways to them, in cluster files and in the text of modules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.ir.cluster.file import cluster_text, read_cluster
from penstock.ir.cluster.spaces import SpaceWay
from penstock.ir.graph import Module
from penstock.ir.text import parse_module, print_module
from penstock.support.errors import UsageError

SPACES = """
[[device]]
name = "cpu:0"

[[space]]
name = "disk"
path = "/mnt/fast-disk"
bytes = "100 GiB"
bandwidth = "2 GB/s"

[[space]]
name = "disk"
host = "localhost"
"""


def test_spaces_beside_the_memory_of_devices(tmp_path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(SPACES)
    cluster = read_cluster(file)
    first, second = cluster.spaces
    assert (first.path, first.bytes, first.bandwidth) == ("/mnt/fast-disk", 100 << 30, 2e9)
    assert (second.host, second.kind, second.bytes) == ("localhost", "file", 0)
    assert cluster.spaces_of("cpu:0") == (first, second)
    assert cluster.space("disk", "cpu:0") == first
    with pytest.raises(UsageError, match="device cpu:0 reaches no memory space 'tape'"):
        cluster.space("tape", "cpu:0")
    for suffix in ("toml", "yaml"):
        (again := tmp_path / f"again.{suffix}").write_text(cluster_text(cluster, again), encoding="utf-8")
        assert read_cluster(again) == cluster


WAYS = """
device:
  - {name: "a", host: left, kind: cuda, arch: sm_90, gpu: 0}
  - {name: "b", host: left, kind: cuda, arch: sm_90, gpu: 1}
  - {name: "c", host: left, kind: cuda, arch: sm_90, gpu: 2}
  - {name: "d", host: left}
space:
  - {name: dram, kind: ram, host: left}
  - {name: far, kind: ram, bandwidth: 40 GB/s, latency: 3 us}
  - {name: disk, bandwidth: 2 GB/s}
way:
  - {device: a, space: dram, bandwidth: 25 GB/s, latency: 20 us, nic: bus}
  - {device: b, space: dram, bandwidth: 15 GB/s, nic: bus}
  - {device: d, space: disk, bandwidth: 1 GB/s}
links:
  host-to-device: {bandwidth: 12 GB/s, latency: 9 us}
"""


def test_ways_between_devices_and_spaces(tmp_path) -> None:
    """A GPU goes to memory of its host at the rate of host-to-device, if it has no way of its own."""
    file = tmp_path / "cluster.yaml"
    file.write_text(WAYS)
    cluster = read_cluster(file)
    for suffix in ("toml", "yaml"):
        (again := tmp_path / f"again.{suffix}").write_text(cluster_text(cluster, again), encoding="utf-8")
        assert read_cluster(again) == cluster
    module = Module("m", cluster=cluster)
    assert parse_module(print_module(module)) == module
    assert [space.name for space in cluster.spaces_of("a")] == ["dram", "far"]
    assert [space.name for space in cluster.spaces_of("d")] == ["disk"]
    with pytest.raises(UsageError, match="device a reaches no memory space 'disk' of kind 'ram'"):
        cluster.space("disk", "a")

    def path(device: str, name: str) -> tuple[float, float, dict[str, float]]:
        way = cluster.way(device, cluster.space(name, device))
        return way.bandwidth, way.latency, dict(way.shares)

    assert path("a", "dram") == (25e9, 2e-5, {"a on left": 25e9, "card bus on left": 25e9})
    # A slow way to a fast bus stays slow.
    assert path("b", "dram") == (15e9, 0, {"b on left": 15e9, "card bus on left": 25e9})
    # The fastest way of a card counts, whichever space of the host it goes to.
    more = replace(cluster, ways=(*cluster.ways, SpaceWay("a", "far", 30e9, 0.0, "bus")))
    assert dict(more.way("b", cluster.space("dram", "b")).shares)["card bus on left"] == 30e9
    elsewhere = replace(cluster, ways=(*cluster.ways, SpaceWay("e", "far", 30e9, 0.0, "bus")))
    assert dict(elsewhere.way("b", cluster.space("dram", "b")).shares)["card bus on left"] == 25e9
    assert path("c", "dram") == (12e9, 9e-6, {"c on left": 12e9})
    assert path("c", "far") == (12e9, 9e-6, {"c on left": 12e9, "left": 40e9})
    assert path("d", "disk") == (1e9, 0, {"d on left": 1e9, "left": 2e9})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('kind = "tape"', "kind must be one of file, ram, got 'tape'"),
        ('path = "a b"', "path must be the path of a folder without blanks"),
        ("path = 3", "path must be the path of a folder without blanks"),
        ('bytes = "-1 GB"', "bytes must be positive or 0"),
        ("bandwidth = 0", "bandwidth must be positive"),
        ('kind = "ram"\npath = "/mnt"', "a path is for files, and this is memory of the host"),
        ("[[way]]", "way 0: device is missing"),
        ("[[way]]", "way 0: bandwidth is missing"),
        ('[[way]]\ndevice = "b"\nspace = "disk"\nbandwidth = 1', "way 0: no device 'b'"),
        ('[[way]]\ndevice = "cpu:0"\nspace = "b"\nbandwidth = 1', "way 0: no space 'b' on the host of 'cpu:0'"),
        (
            '[[space]]\nname = "dram"\nkind = "ram"\n[[way]]\ndevice = "cpu:0"\nspace = "dram"\nbandwidth = 1',
            "way 0: 'cpu:0' has no use for a space of kind 'ram'",
        ),
        (2 * '[[way]]\ndevice = "cpu:0"\nspace = "disk"\nbandwidth = 1\n', "way 1: 'cpu:0' and 'disk' have two ways"),
        ('[[space]]\nname = "disk"\nhost = "localhost"', "space 'disk' is listed twice"),
        ('colour = "red"', "unknown key 'colour', expected one of name, host, kind, bytes, path"),
        ('[[host]]\nname = "a"\n[[space]]\nname = "x"\nhost = "b"', "space 'x': no host 'b', there are a"),
    ],
)
def test_spaces_that_are_wrong_are_refused(tmp_path, line, message) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f"{SPACES}{line}\n")
    with pytest.raises(UsageError) as refused:
        read_cluster(file)
    assert message in str(refused.value)
