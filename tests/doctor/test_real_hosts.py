"""Tests of the doctor on this machine as it is: alone, as two hosts, and with a wire between two of its namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.doctor.examine import examine
from penstock.ir.cluster.cluster import MEASURED, Cluster


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def doctors(
    folder: Path, prefixes: list[list[str]], address: str, interfaces: list[str]
) -> list[subprocess.Popen[bytes]]:
    """One doctor per host, as torchrun would start them."""
    port = free_port()
    running = []
    for rank, (prefix, interface) in enumerate(zip(prefixes, interfaces, strict=True)):
        group = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(prefixes)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
        }
        command = [
            *prefix,
            sys.executable,
            "-P",
            "-m",
            "penstock",
            "doctor",
            "--threads",
            "1",
            "--cluster-out",
            str(folder / "cluster.toml"),
        ]
        running.append(
            subprocess.Popen(
                command,
                env=os.environ | group,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    return running


def finish(running: list[subprocess.Popen[bytes]], seconds: float) -> list[str]:
    try:
        said = [process.communicate(timeout=seconds) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in running] == [0] * len(running), [told.decode() for _, told in said]
    return [out.decode() for out, _ in said]


def test_this_machine_is_measured() -> None:
    report = examine((1,))
    assert report is not None
    assert not [problem for problem in report.problems if "measured" in problem]
    (device,) = report.cluster.devices
    assert device.source == MEASURED
    assert 1e8 < device.flops < 1e13
    assert device.efficiency
    assert 1e7 < report.cluster.link_class("same-host")[0] < 1e12
    assert report.hosts[0].loopback_times[0][1] < report.hosts[0].loopback_times[-1][1]
    assert report.hosts[0].end_times[0][1] < report.hosts[0].end_times[-1][1]
    assert 1e-6 < device.message_overhead < 1e-2
    assert 1e7 < device.socket_bandwidth < 1e12


@pytest.mark.slow
def test_two_processes_are_two_hosts(tmp_path: Path) -> None:
    from penstock.runtime.launch.local import loopback_name

    out = finish(doctors(tmp_path, [[], []], "127.0.0.1", [loopback_name()] * 2), 240)
    cluster = Cluster.load(tmp_path / "cluster.toml")
    name = socket.gethostname()
    assert [d.name for d in cluster.devices] == [f"{name}-0/cpu:0", f"{name}-1/cpu:0"]
    assert [h.name for h in cluster.hosts] == [f"{name}-0", f"{name}-1"]
    assert cluster.link_class("other-host")[0] > 1e7
    assert "other-host" in out[0]
    assert out[1] == "", "only the first rank reports"


def _namespaces_work() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"psd{os.getpid() % 10000}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


@pytest.mark.slow
def test_the_wire_between_two_namespaces_is_measured(tmp_path: Path) -> None:
    """Two network namespaces, which share no loopback, with a wire between them."""
    if not _namespaces_work():
        pytest.skip("needs to make network namespaces")
    pid = os.getpid() % 10000
    spaces, ends = [f"psa{pid}", f"psb{pid}"], [f"va{pid}", f"vb{pid}"]

    def ip(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=20)

    try:
        for space in spaces:
            ip("ip", "netns", "add", space)
        ip(
            "ip",
            "link",
            "add",
            ends[0],
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            spaces[1],
        )
        for i, (space, end) in enumerate(zip(spaces, ends, strict=True)):
            ip("ip", "-n", space, "addr", "add", f"10.213.7.{i + 1}/24", "dev", end)
            for device in (end, "lo"):
                ip("ip", "-n", space, "link", "set", device, "up")
        finish(doctors(tmp_path, [["ip", "netns", "exec", space] for space in spaces], "10.213.7.1", ends), 240)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    bandwidth, latency = Cluster.load(tmp_path / "cluster.toml").link_class("other-host")
    assert 1e7 < bandwidth < 1e12
    assert 0 <= latency < 1
