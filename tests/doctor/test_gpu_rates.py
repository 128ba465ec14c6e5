"""Rates of GPUs from seconds, their way into a cluster file, and what plans make of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.commands.running.doctor import _sheet_lines
from penstock.doctor import examine as doctor
from penstock.doctor import gpu_rates
from penstock.doctor.examine import HostFacts, cluster_of
from penstock.doctor.gpu_rates import GpuEdge, GpuRates, HostGpus, rates_of_gpu, with_gpu_rates, work
from penstock.ir.cluster.cluster import MEASURED, Cluster, device_of_gpu
from penstock.ir.ops import cost_of
from penstock.passes.costs.prices import efficiency_of
from penstock.planning.facts import ASSUMED, sources_of
from penstock.support.hardware import Gpu

SIDE = 4096
GPU = Gpu(0, "sm_90", 80 << 30, 0.0, "GPU-0a")
SHARES = {
    "products": 0.95, "convolutions": 0.7, "attention": 0.4, "products.bf16": 11.0, "convolutions.bf16": 6.0,
    "attention.bf16": 5.0, "products.f16": 12.0, "convolutions.f16": 6.5, "attention.f16": 5.5,
}  # fmt: skip
RATES = GpuRates(5e13, 2.8e12, SHARES, 2e-6, 3e-5)


def seconds_of(rates: GpuRates) -> dict[str, float]:
    """Return what the work takes on a GPU of these rates, by the definition of each."""
    shares = {"flops": 1.0, **rates.efficiency}
    assert rates.overhead is not None
    assert rates.call_overhead is not None
    seconds = {key: cost_of(op).flops / (rates.flops * shares[key]) for key, op in work(SIDE).items()}
    launches = {f"tiny{n}": rates.call_overhead + n * rates.overhead for n in (8, 40)}
    # Twelve bytes for each element of a list of 256 MiB.
    return {**seconds, **launches, "bandwidth": 12 * (1 << 26) / rates.bandwidth}


def test_rates_are_found_again() -> None:
    found = rates_of_gpu(seconds_of(RATES), SIDE)
    assert found == RATES
    # The control: tensor cores that take twice as long have half the share, and nothing else changes.
    seconds = seconds_of(RATES)
    slower = rates_of_gpu({**seconds, "products.bf16": 2 * seconds["products.bf16"]}, SIDE)
    assert slower.efficiency == {**SHARES, "products.bf16": 5.5}
    # A share that is missing is left out.
    del seconds["attention.bf16"]
    assert rates_of_gpu(seconds, SIDE).efficiency == {k: v for k, v in SHARES.items() if k != "attention.bf16"}
    # Where launches could not be measured, they stay as the usual card has them, which a plan calls assumed.
    del seconds["tiny8"]
    device = with_gpu_rates(device_of_gpu(GPU), rates_of_gpu(seconds, SIDE))
    usual = device_of_gpu(GPU)
    assert (device.overhead, device.call_overhead) == (usual.overhead, usual.call_overhead)
    assert device.flops == RATES.flops
    assert {"kernels", "calls"} <= set(sources_of(device)[ASSUMED])
    # The control: measured ones it does not.
    assert {"kernels", "calls"} <= set(sources_of(with_gpu_rates(usual, RATES))[MEASURED])


def test_launches_that_take_nothing_are_measured(tmp_path: Path) -> None:
    """Zero is a measurement: no estimate takes its place, and the file has it."""
    seconds = seconds_of(RATES) | {"tiny8": 3e-5, "tiny40": 3e-5}
    found = rates_of_gpu(seconds, SIDE)
    assert (found.overhead, found.call_overhead) == (0.0, 3e-5)
    device = with_gpu_rates(device_of_gpu(GPU), found)
    assert (device.overhead, device.call_overhead) == (0.0, 3e-5)
    file = tmp_path / "cluster.toml"
    file.write_text(Cluster((device,)).to_toml(), encoding="utf-8")
    assert Cluster.load(file).devices == (device,)


def test_copies_that_fail_are_told_and_others_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(here: torch.device, there: torch.device) -> list[tuple[int, float]]:
        if (here.index, there.index) == (7, 5):
            raise RuntimeError("CUDA error: peers have quarrelled\nCompile with other words")
        return [(size, 4e-6 + size / 3e11) for size in (1 << 12, 1 << 26)]

    monkeypatch.setattr(gpu_rates, "_copies", copies)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (7, 6))
    # Indices of the driver, and of torch.
    devices = {i: torch.device("cuda", number) for i, number in enumerate((7, 6, 5))}
    edges, problems = gpu_rates.measure_edges(devices)
    assert [(edge.source, edge.target) for edge in edges] == [(1, 2)]
    assert (edges[0].bandwidth, edges[0].latency) == pytest.approx((3e11, 4e-6), rel=0.01)
    assert problems == ["cuda:0: copies to cuda:2 not measured: CUDA error: peers have quarrelled"]


def test_plans_price_tensor_cores_as_measured() -> None:
    measured, usual = with_gpu_rates(device_of_gpu(GPU), RATES), device_of_gpu(GPU)
    for family in ("products", "convolutions", "attention"):
        for dtype in ("bf16", "f16"):
            assert efficiency_of(measured, family, dtype) == SHARES[f"{family}.{dtype}"]
            # The control: without a measurement the ratio of the data sheet counts.
            assert efficiency_of(usual, family, dtype) != SHARES[f"{family}.{dtype}"]
        assert efficiency_of(measured, family, "f32") == SHARES[family]


def test_measured_gpus_and_their_edges_come_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [GPU, Gpu(1, "sm_90", 80 << 30, 0.0, "GPU-1a")]
    # The second one could not be measured.
    measured = HostGpus({0: RATES}, [GpuEdge(0, 1, 3e11, 4e-6)])
    devices = [doctor._gpu_with_rates(gpu, measured) for gpu in gpus]
    plain = [doctor._plain(device) for device in devices]
    facts = HostFacts("a", "", {}, "", 4, None, {}, 1 << 34, None, plain, None, None, [], gpu_edges=measured.edges)
    for hosts, prefix in (([facts], ""), ([facts, facts], "a/")):
        cluster = cluster_of(hosts, {})
        assert cluster.path(f"{prefix}cuda:0", f"{prefix}cuda:1")[:2] == (3e11, 4e-6)
        if len(hosts) > 1:
            continue
        file = tmp_path / "cluster.toml"
        file.write_text(cluster.to_toml(), encoding="utf-8")
        assert Cluster.load(file) == cluster
        assert dict(cluster.device("cuda:0").efficiency) == SHARES
        assert _sheet_lines(cluster.devices) == [
            "cuda:1: not measured; data sheet of H100 SXM: f32 67, tf32 495, bf16 989, f16 989 TFLOP/s"
        ]
