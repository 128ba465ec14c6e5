"""GPUs in a cluster: by list, by file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ir.cluster.cluster import Cluster
from penstock.support.errors import UsageError


def test_a_list_names_processors_and_architectures() -> None:
    cluster = Cluster.listed("cpu,sm_90,sm_80")
    assert [(d.name, d.kind, d.target) for d in cluster.devices] == [
        ("cpu:0", "cpu", "native"),
        ("cuda:0", "cuda", "sm_90"),
        ("cuda:1", "cuda", "sm_80"),
    ]
    assert cluster.device("cuda:0").flops > cluster.device("cuda:1").flops > cluster.device("cpu:0").flops
    for word in ("gpu", "sm_", "sm_9", "sm_ninety"):
        with pytest.raises(UsageError, match=f"unknown device '{word}'"):
            Cluster.listed(f"cpu,{word}")


def test_a_file_gives_the_architecture_of_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[[device]]\nname = "a"\nkind = "gpu"\narch = "sm_90"\nmemory = "80 GiB"\n\n[[device]]\nname = "b"\n'
    )
    cluster = Cluster.load(file)
    first = cluster.device("a")
    assert (first.kind, first.target, first.spaces) == ("cuda", "sm_90", (("hbm", 80 * 2**30),))
    # What is written is read back as the same.
    file.write_text(cluster.to_toml())
    assert Cluster.load(file) == cluster


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('kind = "cuda"', "a cuda device needs an architecture"),
        ('kind = "cuda"\narch = 90', "a cuda device needs an architecture"),
        ('kind = "cuda"\narch = "sm_9"', "a cuda device needs an architecture"),
        ('kind = "cpu"\narch = "sm_90"', "arch is for cuda devices"),
    ],
)
def test_devices_without_sense_are_refused(lines: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'[[device]]\nname = "a"\n{lines}\n')
    with pytest.raises(UsageError, match=message):
        Cluster.load(file)
