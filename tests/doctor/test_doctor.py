"""Tests of the doctor: the meaning of its seconds against a made-up machine, and messages for missing parts."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import types
from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.commands.running.doctor import _sheet_lines
from penstock.doctor import examine as doctor
from penstock.doctor.examine import HostFacts, cluster_of, examine
from penstock.doctor.kernels import rates_of, yardsticks
from penstock.doctor.links import SIZES, Loopback, Wire, fit
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.support import hardware as machine
from penstock.support.errors import PenstockError

from .known_machine import RATES, seconds_of


def test_rates_are_found_again() -> None:
    assert rates_of(seconds_of(RATES), 1) == RATES
    # The control: a slower product is a lower rate, and changes every share of it.
    slower = seconds_of(RATES) | {"large": 2 * seconds_of(RATES)["large"]}
    found = rates_of(slower, 1)
    assert found.flops == pytest.approx(1e11, rel=0.01)
    assert found.efficiency["attention"] == pytest.approx(0.8, rel=0.01)
    assert found.bandwidth == RATES.bandwidth


def test_a_machine_whose_memory_is_as_fast_has_no_cache_worth_telling() -> None:
    times = seconds_of(RATES)
    flat = {name: t for name, t in times.items() if not name.startswith("sum")}
    flat |= {
        s.name: RATES.call_overhead + 3 * sum(v.type.nbytes for v in s.graph.ins) / 1e10
        for s in yardsticks()
        if s.key == "cache"
    }
    found = rates_of(flat, 1)
    assert (found.cache, found.cache_bandwidth) == (0, 0.0)


def test_a_line_is_found_in_times() -> None:
    line = fit([(n, 5e-5 + n / 2e9) for n in SIZES])
    assert line == pytest.approx((2e9, 5e-5), rel=1e-9)
    # Errors of some percent change it by some percent, whatever the size of the messages.
    noisy = fit([(n, (5e-5 + n / 2e9) * (1 + 0.04 * (-1) ** i)) for i, n in enumerate(SIZES)])
    assert noisy == pytest.approx((2e9, 5e-5), rel=0.1)
    # Never less than nothing.
    assert fit([(1000, 1e-6), (2000, 2e-6), (4000, 4.1e-6)]).latency >= 0
    assert fit([(1000, 1e-3), (2000, 1e-3), (4000, 0.9e-3)]).bandwidth > 0


def host(name: str, devices: list[Device], loopback: tuple[float, float] | None = (2e9, 5e-5)) -> HostFacts:
    plain = [{"name": d.name, "fields": d.fields(), "spaces": dict(d.spaces)} for d in devices]
    return HostFacts(name, "", {}, "", 4, None, {}, 1 << 34, None, plain, loopback, None, [])


def test_hosts_become_a_cluster(tmp_path: Path) -> None:
    devices = [
        Device("cpu:0", flops=1e11, efficiency=(("products", 0.9),)),
        Device("cpu:1", spaces=(("ram", 1 << 30),)),
    ]
    hosts = [host("a", devices), host("b", devices[:1], (4e9, 7e-5)), host("c", devices[:1], None)]
    pairs = {(0, 1): Wire(1e9, 1e-4), (0, 2): Wire(1.1e9, 1e-4), (1, 2): Wire(1e8, 9e-4)}
    cluster = cluster_of(hosts, pairs)
    assert [d.name for d in cluster.devices] == ["a/cpu:0", "a/cpu:1", "b/cpu:0", "c/cpu:0"]
    assert cluster.device("a/cpu:0").efficiency == (("products", 0.9),)
    assert cluster.link_class("same-host") == (3e9, 6e-5)
    assert cluster.link_class("other-host") == (1e9, 1e-4)
    # The pair that is unlike the others has links of its own; the others go by class, through their hosts' cards.
    assert [(link.a, link.b, link.bandwidth, link.latency) for link in cluster.links] == [
        ("b/cpu:0", "c/cpu:0", 1e8, 9e-4)
    ]
    assert cluster.path("a/cpu:1", "c/cpu:0") == (
        1e9,
        1e-4,
        (("nic of a out", 1.1e9), ("nic of c in", 1.1e9)),
        math.inf,
    )
    file = tmp_path / "cluster.toml"
    file.write_text(cluster.to_toml(), encoding="utf-8")
    assert Cluster.load(file) == cluster
    # One host needs no names of hosts.
    alone = cluster_of(hosts[:1], {})
    assert [d.name for d in alone.devices] == ["cpu:0", "cpu:1"]
    assert alone.hosts == ()


# ------------------------------------------------------------------------------------------------ what is missing


class FakeError(Exception):
    pass


def fake_nvml(devices: int, *, fails: str = "") -> types.SimpleNamespace:
    """An NVML whose devices know nothing but their memory and architecture."""

    def refuse(kind: type[Exception]) -> object:
        def call(*given: object) -> object:
            raise kind("refused")

        return call

    unsupported = type("NotSupported", (FakeError,), {})
    nvml = types.SimpleNamespace(
        NVMLError=FakeError, NVMLError_NotSupported=unsupported, NVMLError_FunctionNotFound=type("Missing", (FakeError,), {}), NVMLError_Unknown=type("Unknown", (FakeError,), {}),
        NVML_CLOCK_MEM=2, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: devices, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetCudaComputeCapability=lambda h: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(total=80 << 30),
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}a-{h}b",
        nvmlDeviceGetMaxClockInfo=refuse(unsupported), nvmlDeviceGetMemoryBusWidth=refuse(unsupported),
    )  # fmt: skip
    if fails:
        setattr(nvml, fails, refuse(FakeError))
    return nvml


def test_gpus_are_asked_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(2))
    found, why = machine.gpus()
    assert why == ""
    assert [(g.index, g.arch, g.memory, g.bandwidth, g.uuid) for g in found] == [
        (0, "sm_90", 80 << 30, 0.0, "GPU-0a-0b"),
        (1, "sm_90", 80 << 30, 0.0, "GPU-1a-1b"),
    ]
    for fails, expected in (
        ("nvmlInit", "no NVIDIA driver answers"),
        ("nvmlDeviceGetCount", "does not say what devices"),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(1, fails=fails))
        found, why = machine.gpus()
        assert found == []
        assert expected in why
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(0))
    assert machine.gpus() == ([], "the NVIDIA driver has no devices")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in machine.gpus()[1]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("1,0", [1, 0]), ("GPU-1", [1]), ("0,7,1", [0]), ("", []), ("-1", []), ("GPU-", []), ("1, 1", [1])],
)
def test_devices_are_those_that_cuda_shows(choice: str, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    found, why = machine.gpus()
    assert [g.uuid for g in found] == [f"GPU-{i}a-{i}b" for i in expected]
    assert [g.index for g in found] == list(range(len(expected)))
    assert bool(expected) != ("hides all" in why)
    devices = Cluster.detect().devices[1:]
    assert [(d.name, d.gpu_on_host) for d in devices] == [(f"cuda:{g.index}", g.uuid) for g in found]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and nothing but the pretended machine is measured."""
    monkeypatch.setattr(doctor, "compile_yardsticks", lambda folder: None)
    monkeypatch.setattr(
        doctor, "_run_yardsticks", lambda folder, threads, part: [rates_of(seconds_of(RATES), n) for n in threads]
    )
    loopback = Loopback(
        [(n, 5e-5 + n / 2e9) for n in SIZES],
        [(n, 4e-5 + n / 3e9) for n in SIZES],
        [(n, 1e-5 + n / 16e9) for n in SIZES],
    )
    monkeypatch.setattr(doctor, "measure_loopback", lambda timeout: loopback)
    monkeypatch.setattr(doctor, "measured_bandwidth", lambda space: 1.5e9)
    monkeypatch.setattr(doctor, "in_memory", lambda folder: "")
    monkeypatch.setattr(machine, "gpus", lambda: ([], "nvidia-ml-py is not installed"))
    monkeypatch.delenv("RANK", raising=False)


def test_the_command_writes_a_file_that_plans_take(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cluster.toml", "cluster.yaml"):
        assert main(["doctor", "--threads", "1,2", "--cluster-out", str(tmp_path / name), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        cluster = Cluster.load(tmp_path / name)
        assert [d.threads for d in cluster.devices] == [1, 2]
        assert all(
            (d.flops, d.bandwidth, dict(d.efficiency)) == (RATES.flops, RATES.bandwidth, RATES.efficiency)
            for d in cluster.devices
        )
        assert cluster.link_class("same-host") == pytest.approx((2e9, 5e-5), rel=1e-3)
        assert all(
            (d.message_overhead, d.socket_bandwidth) == pytest.approx((4e-5, 3e9), rel=1e-3) for d in cluster.devices
        )
        # One of the two ends copies.
        assert all(
            (d.shared_overhead, d.copy_bandwidth) == pytest.approx((1e-5, 8e9), rel=1e-3) for d in cluster.devices
        )
        assert told["cluster"]["devices"][1]["threads"] == 2
        assert cluster.way("cpu:1", cluster.space("disk", "cpu:1")).bandwidth == 1.5e9
        assert told["cluster"]["spaces"][0]["bandwidth"] == 1.5e9
        assert told["hosts"][0]["cores"] == machine.usable_cores()
    assert main(["doctor", "--devices", "2"]) == 0
    out = capsys.readouterr().out
    assert "same-host" in out
    assert re.search(r"^disk +1.5 ", out, re.MULTILINE)


def test_a_quota_makes_ends_of_messages_longer(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    monkeypatch.setattr(
        doctor,
        "_run_yardsticks",
        lambda folder, threads, part: [parts.append(part), rates_of(seconds_of(RATES), 1)][1:],
    )
    for quota, times in ((None, 1), (2.0, 1), (0.5, 2)):
        monkeypatch.setattr(machine, "core_quota", lambda quota=quota: quota and machine.CoreQuota(quota, 0.1))
        report = examine([1])
        assert report is not None
        (device,) = report.cluster.devices
        assert (device.quota, device.quota_period) == ((0.5, 0.1) if times == 2 else (1.0, 0.0))
        assert (device.message_overhead, device.socket_bandwidth) == pytest.approx(
            (4e-5 * times, 3e9 / times), rel=1e-2
        )
    assert parts == [1.0, 1.0, 0.5]


def test_an_end_of_a_message_is_one_thread(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of four threads within two cores: each of them sends with one thread, which the quota leaves alone."""
    parts = []
    monkeypatch.setattr(
        doctor,
        "_run_yardsticks",
        lambda folder, threads, part: [parts.append(part), *(rates_of(seconds_of(RATES), 1) for _ in threads)][1:],
    )
    for quota, times in ((2.0, 1), (1.0, 2)):
        monkeypatch.setattr(machine, "core_quota", lambda quota=quota: machine.CoreQuota(quota, 0.1))
        report = examine([4, 4])
        assert report is not None
        for device in report.cluster.devices:
            assert (device.message_overhead, device.socket_bandwidth) == pytest.approx(
                (4e-5 * times, 3e9 / times), rel=1e-2
            )
    assert parts == [0.25, 0.125]


def test_all_problems_are_said(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def broken(*given: object) -> list[object]:
        raise PenstockError("no compiler")

    monkeypatch.setattr(doctor, "_run_yardsticks", broken)
    monkeypatch.setattr(doctor, "measure_loopback", broken)
    monkeypatch.setattr(machine, "gpus", lambda: ([], "no NVIDIA driver answers: refused"))
    monkeypatch.setattr(machine, "core_quota", lambda: machine.CoreQuota(0.5, 0.1))
    monkeypatch.setattr(os, "getloadavg", lambda: (64.0, 0.0, 0.0))
    report = examine([machine.usable_cores(), 1])
    assert report is not None
    text = "\n".join(report.problems)
    for expected in (
        "they slow each other down",
        "0.5 cores' worth of time",
        "rates are guesses: no compiler",
        "no NVIDIA driver answers",
        "64.0 of",
        "no compiler",
    ):
        assert expected in text
    assert report.cluster.devices[0].efficiency == ()
    assert report.cluster.devices[0].quota == 1.0
    assert report.cluster.classes == ()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--threads", "1,x"], "bad --threads"),
        (["--threads", "0"], "bad --threads"),
        (["--threads", "1,1", "--devices", "3"], "--threads has 2 numbers, --devices is 3"),
        (["--cluster-out", "/nowhere/at/all.toml"], "there is no folder /nowhere/at"),
        (["--cluster-out", "/"], "is a folder"),
    ],
)
def test_what_makes_no_sense_is_refused_before_measuring(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert expected in capsys.readouterr().err


def test_rates_of_gpus_are_told_by_element_type_and_not_as_measured() -> None:
    devices = [Device("cpu:0"), Device("cuda:0", "cuda", target="sm_90"), Device("cuda:1", "cuda", target="sm_75")]
    assert _sheet_lines(devices) == [
        "cuda:0: not measured; data sheet of H100 SXM: f32 67, tf32 495, bf16 989, f16 989 TFLOP/s",
        "cuda:1: not measured; data sheet of T4: f32 8.1, f16 65 TFLOP/s",
    ]
    # The control: processors are measured.
    assert _sheet_lines(devices[:1]) == []
