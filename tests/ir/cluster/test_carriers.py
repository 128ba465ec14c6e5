"""What carries messages between two devices, and what they take: memory, NCCL, and gloo with copies at GPUs."""

from __future__ import annotations

import pytest

from penstock.ir.cluster.cluster import COPY_BANDWIDTH, GLOO, IPC, MEMORY, NCCL, PINNED, Cluster, Device, Link
from penstock.ir.cluster.gpus import LIBRARY_OVERHEAD, SHEETS, sheet_of, usual_settings

SOCKETS = 2e9
CLUSTER = Cluster(
    (
        Device("cpu:0", host="a", socket_bandwidth=SOCKETS),
        Device("cpu:1", host="a", socket_bandwidth=SOCKETS),
        Device("cuda:0", "cuda", host="a", target="sm_90", socket_bandwidth=SOCKETS),
        Device("cuda:1", "cuda", host="a", target="sm_90", socket_bandwidth=SOCKETS),
        Device("twin", "cuda", host="a", target="sm_90", gpu="0", socket_bandwidth=SOCKETS),
        Device("far cpu", host="b", socket_bandwidth=SOCKETS),
        Device("far cuda:0", "cuda", host="b", target="sm_80", socket_bandwidth=SOCKETS),
    ),
    links=(Link("cpu:0", "far cuda:0", 1e9, 1e-4), Link("cuda:0", "far cuda:0", 1e10, 1e-5)),
)


@pytest.mark.parametrize(
    ("a", "b", "carrier"),
    [
        ("cpu:0", "cpu:1", MEMORY),
        ("cpu:0", "far cpu", GLOO),
        ("cpu:0", "cuda:0", PINNED),
        ("cuda:0", "cuda:1", IPC),
        ("cuda:0", "twin", IPC),
        # The same number on another host is another GPU.
        ("cuda:0", "far cuda:0", NCCL),
        ("cpu:0", "far cuda:0", GLOO),
    ],
)
def test_every_pair_has_its_carrier(a: str, b: str, carrier: str) -> None:
    assert CLUSTER.carrier(a, b) == CLUSTER.carrier(b, a) == carrier
    assert CLUSTER.shares_memory(a, b) == (carrier in (MEMORY, PINNED))


def test_messages_of_a_gpu_are_copied_and_go_through_memory_or_the_network() -> None:
    """A byte is copied to or from each GPU (10 GB/s), and is written to memory (7 GB/s) or goes through the network."""
    rate = CLUSTER.path("cpu:0", "cuda:0").bandwidth
    assert 1 / rate == pytest.approx(1 / 1e10 + 1 / COPY_BANDWIDTH)
    far = CLUSTER.path("cpu:0", "far cuda:0")
    assert 1 / far.bandwidth == pytest.approx(1 / 1e9 + 1 / 1e10)
    assert far.latency == pytest.approx(1e-4 + 5e-5)
    # The controls: what NCCL, memory or GPUs themselves carry goes at the rate of its link.
    assert CLUSTER.path("cuda:0", "cuda:1").bandwidth == CLUSTER.link("cuda:0", "cuda:1").bandwidth
    assert CLUSTER.path("cuda:0", "far cuda:0").bandwidth == 1e10
    assert CLUSTER.path("cpu:0", "cpu:1").bandwidth == CLUSTER.link("cpu:0", "cpu:1").bandwidth
    overhead = CLUSTER.message_overhead
    assert overhead("cuda:0", "cuda:1") == LIBRARY_OVERHEAD < overhead("far cuda:0", "cpu:0")
    assert overhead("cuda:0", "cpu:0") == overhead("cpu:0", "cpu:1") < overhead("far cpu", "cpu:0")


def test_sheets_know_what_tensor_cores_do() -> None:
    for target, sheet in SHEETS.items():
        assert usual_settings(target)["flops"] == sheet.f32
        assert sheet.speedup("f32") == sheet.speedup("i8") == 1.0
        assert sheet.speedup("f16") > 1.9
        # The first architecture has none for bfloat16 and tf32.
        assert (sheet.speedup("bf16") == 1.0) == (target == "sm_75") == (sheet.tf32 == 0.0)
    assert sheet_of("sm_90a") is SHEETS["sm_90"]
    assert sheet_of("sm_87") is SHEETS["sm_80"]


def test_files_give_gpus_what_sheets_say(tmp_path: object) -> None:
    text = '[[device]]\nname = "cuda:0"\nkind = "cuda"\narch = "sm_120"\n'
    path = tmp_path / "cluster.toml"  # type: ignore[operator]
    path.write_text(text)
    device = Cluster.load(path).device("cuda:0")
    assert {name: getattr(device, name) for name in usual_settings("sm_120")} == usual_settings("sm_120")
    # What a file says comes first, and is written and read back.
    path.write_text(text + 'overhead = "1 us"\nflops = 1e12\n')
    cluster = Cluster.load(path)
    assert (cluster.device("cuda:0").overhead, cluster.device("cuda:0").flops) == (1e-6, 1e12)
    path.write_text(cluster.to_toml())
    assert Cluster.load(path) == cluster
