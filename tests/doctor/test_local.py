"""Tests of the rates of this machine: who gets measured ones, when they are measured, and what plans say of them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.commands.parser import main
from penstock.doctor import local
from penstock.doctor.kernels import QUICK, Rates, rates_of, yardsticks
from penstock.doctor.local import LocalRates, measured_cluster
from penstock.ir.cluster.cluster import MEASURED, Cluster, Device, LinkClass
from penstock.ir.ops import cost_of
from penstock.models import write_mlp
from penstock.passes.costs.prices import ATTENTION, CONVOLUTIONS, SQUARES, cost
from penstock.planning.facts import sources_of, sources_of_links
from penstock.support.errors import PenstockError, UsageError
from penstock.support.hardware import CoreQuota

from .known_machine import RATES as SHARES
from .known_machine import seconds_of

MEASURE = local._measured
RATES = Rates(1, 9e10, 2e10, 8 << 20, 9e10, 2e-7, 3e-6, {"products": 1.02, "elements": 0.3}, {"f32": 9e10})
SLOWER = Rates(1, 7e10, 1e10, 4 << 20, 5e10, 4e-7, 5e-6, {"products": 0.98, "elements": 0.1}, {"f32": 7e10})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """Ask for measured rates, kept in a folder of the test, of a machine of two cores. Return the measurements made."""
    made: list[tuple[int, int]] = []

    def measured(threads: int, count: int, part: float) -> LocalRates:
        made.append((threads, count))
        return LocalRates([RATES, SLOWER][:count], (7e9, 2e-5), (8e9, 3e-5))

    monkeypatch.setenv("PENSTOCK_RATES", MEASURED)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(local, "_measured", measured)
    monkeypatch.setattr("penstock.support.hardware.usable_cores", lambda: 2)
    monkeypatch.setattr("penstock.ir.cluster.cluster.usable_cores", lambda: 2)
    monkeypatch.setattr("penstock.support.hardware.load", lambda: 0.0)
    return made


def test_a_machine_is_measured_once(calls: list[tuple[int, int]]) -> None:
    said: list[str] = []
    cluster = measured_cluster(Cluster.local(2), said.append)
    assert measured_cluster(Cluster.local(2), said.append) == cluster
    assert calls == [(1, 2)]
    assert len(said) == 1
    # Medians, so that equal devices stay equal to planners.
    first, second = cluster.devices
    assert (first.flops, first.bandwidth, first.call_overhead) == (8e10, 1.5e10, 4e-6)
    assert dict(first.efficiency) == {"products": 1.0, "elements": 0.2}
    assert (first.shared_overhead, first.copy_bandwidth, first.source) == (3e-5, 4e9, MEASURED)
    assert second == replace(first, name="cpu:1")
    assert cluster.link_class("same-host") == (7e9, 2e-5)


def test_other_numbers_of_devices_are_measured_for_themselves(calls: list[tuple[int, int]]) -> None:
    assert len(measured_cluster(Cluster.local(1)).devices) == 1
    # More devices than cores: as many as there are cores stand for all.
    assert len({d.flops for d in measured_cluster(Cluster.local(5)).devices}) == 1
    assert calls == [(2, 1), (1, 2)]


def test_devices_have_their_part_of_a_quota(calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """More devices than were measured at once share it anew: they take turns as whole threads, each with its rates."""
    monkeypatch.setattr("penstock.support.hardware.core_quota", lambda: CoreQuota(1.0, 0.1))
    two, four = (measured_cluster(Cluster.local(count)).devices for count in (2, 4))
    assert {(device.quota, device.quota_period) for device in two} == {(0.5, 0.1)}
    assert {(device.quota, device.quota_period) for device in four} == {(1.0, 0.0)}
    cpu, gpu = measured_cluster(Cluster.listed("cpu,sm_90")).devices
    assert (cpu.quota, gpu.quota, gpu.quota_period) == (0.5, 1.0, 0.0)


def test_a_gpu_beside_a_processor_keeps_its_sheet(calls: list[tuple[int, int]]) -> None:
    cpu, gpu = measured_cluster(Cluster.listed("cpu,sm_90")).devices
    assert (cpu.source, gpu.source) == (MEASURED, "")
    assert gpu == Cluster.listed("cpu,sm_90").devices[1]


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster((Device("cpu:0", flops=1e11),)),
        Cluster((Device("a", host="b"),)),
        Cluster.local(threads=(3, 1)),
        Cluster(()),
    ],
    ids=["given rates", "another host", "unequal threads", "nothing"],
)
def test_what_a_user_described_is_left_alone(cluster: Cluster, calls: list[tuple[int, int]]) -> None:
    assert measured_cluster(cluster) is cluster
    assert not calls


@pytest.mark.parametrize(("variable", "value"), [("PENSTOCK_RATES", "assumed"), ("PENSTOCK_CACHE", "off")])
def test_measuring_can_be_switched_off(
    variable: str, value: str, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert measured_cluster(Cluster.local(2)) == Cluster.local(2)
    assert not calls
    monkeypatch.setenv("PENSTOCK_RATES", "guessed")
    with pytest.raises(UsageError, match="PENSTOCK_RATES 'guessed'"):
        measured_cluster(Cluster.local(2))


def test_a_damaged_entry_is_measured_again(calls: list[tuple[int, int]], tmp_path: Path) -> None:
    measured_cluster(Cluster.local(2))
    (entry,) = (tmp_path / "cache" / "rates").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    measured_cluster(Cluster.local(2))
    assert len(calls) == 2


def test_a_busy_machine_is_measured_again_where_the_clock_counts(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.support.hardware.load", lambda: 2.0)
    for _ in range(2):
        measured_cluster(Cluster.local(1))
        measured_cluster(Cluster.local(2))
    assert calls == [(2, 1), (1, 2), (2, 1)]


def test_a_measurement_that_fails_is_told(calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(threads: int, count: int, part: float) -> LocalRates:
        raise PenstockError("no memory is shared", where="rates")

    monkeypatch.setattr(local, "_measured", fails)
    said: list[str] = []
    assert measured_cluster(Cluster.local(2), said.append) == Cluster.local(2)
    assert "rates are assumed: rates: no memory is shared" in said[-1]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -9 $$", "ended with exit code -9"),
        ("echo a library greets", "it answered with no rates"),
        ("sleep 60 & echo $! > pid; wait", "did not end within 1 s"),
    ],
)
def test_a_process_that_ends_without_rates_is_told(
    script: str, said: str, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that it started does not stay behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "_measured", MEASURE)
    monkeypatch.setattr(local, "command_of", lambda name: ["sh", "-c", script])
    monkeypatch.setattr(local, "compile_yardsticks", lambda *given, **how: None)
    monkeypatch.setattr(local, "_TIMEOUT", 1.0)
    lines: list[str] = []
    assert measured_cluster(Cluster.local(2), lines.append) == Cluster.local(2)
    assert said in lines[-1]
    if "pid" in script:
        status = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
        deadline = time.monotonic() + 10
        while is_running(status) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(status)


def is_running(status: Path) -> bool:
    """A process that ended and that nobody has waited for is not."""
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_plans_say_what_was_measured(
    calls: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(write_mlp(tmp_path / "mlp.onnx", (8, 16, 4), 4))
    arguments = ["plan", model, "--devices", "2", "--loss", "mse"]
    assert main([*arguments, "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["rates"]
    assert rates["links"] == {"same-host": "measured", "other-host": "assumed", "host-to-device": "assumed"}
    assert "products" in rates["devices"]["cpu:1"]["measured"]
    assert "share of convolutions" in rates["devices"]["cpu:1"]["assumed"]
    main(arguments)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rates of cpu:0, cpu:1: "))
    assert line.startswith("rates of cpu:0, cpu:1: measured: products, memory, cache")
    # Without a measurement nothing may be called one.
    monkeypatch.setenv("PENSTOCK_RATES", "assumed")
    main(arguments)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rates of "))
    assert "assumed" in line
    assert "measured:" not in line


def test_sources_of_figures_are_told_apart(tmp_path: Path) -> None:
    device = Device("a", flops=1e12, efficiency=(("products.bf16", 2.0),))
    sources = sources_of(device)
    assert sources["given"] == ["products", "share of products"]
    assert "memory" in sources["assumed"]
    assert sources_of(Device("a", threads=4, flops=2e11)).keys() == {"assumed"}
    path = tmp_path / "c.toml"
    path.write_text(Cluster((Device("a", bandwidth=3e10, source=MEASURED),)).to_toml())
    assert sources_of(Cluster.load(path).devices[0])["measured"] == ["memory"]


def test_links_are_measured_where_all_their_devices_are() -> None:
    """One measured device makes no link a measured one."""
    classes = tuple(LinkClass(kind, 1e9, 1e-4) for kind in ("same-host", "other-host"))

    def sources(*hosts: tuple[str, str]) -> dict[str, str]:
        devices = tuple(Device(f"d{i}", host=host, source=source) for i, (host, source) in enumerate(hosts))
        return sources_of_links(Cluster(devices, classes=classes))

    mixed = sources(("a", MEASURED), ("a", MEASURED), ("b", ""))
    assert mixed == {"same-host": "measured", "other-host": "given", "host-to-device": "assumed"}
    assert sources(("a", MEASURED), ("a", ""))["same-host"] == "given"
    assert sources(("a", MEASURED), ("b", MEASURED))["other-host"] == "measured"
    assert sources(("a", MEASURED))["same-host"] == "measured"


def test_a_measurement_by_other_yardsticks_is_not_read(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An older version measured no convolutions: the machine is measured anew, beside the entry of that version."""
    with monkeypatch.context() as older:
        older.setattr(local, "QUICK", tuple(name for name in QUICK if not name.startswith("conv")))
        for _ in range(2):
            measured_cluster(Cluster.local(2))
    assert len(calls) == 1
    for _ in range(2):
        measured_cluster(Cluster.local(2))
    assert len(calls) == 2
    assert len(list((tmp_path / "cache" / "rates").iterdir())) == 2


def test_quick_yardsticks_tell_every_family_of_work() -> None:
    """The rates that they give are those of all yardsticks, but for products of 16 bits. The oracle is a machine of
    known rates."""
    times = seconds_of(SHARES)
    quick = rates_of({name: times[name] for name in QUICK}, 1)
    assert quick.efficiency == {k: v for k, v in SHARES.efficiency.items() if not k.startswith("products.")}
    assert (quick.flops, quick.bandwidth, quick.cache) == (SHARES.flops, SHARES.bandwidth, SHARES.cache)
    assert {CONVOLUTIONS, SQUARES, ATTENTION} < quick.efficiency.keys()
    # The control: without its yardstick a family has no share.
    less = rates_of({name: times[name] for name in QUICK if name != "conv"}, 1)
    assert quick.efficiency.keys() - less.efficiency.keys() == {SQUARES}


def test_measured_shares_of_convolutions_price_them(
    calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution by squares takes as long as the measured share says; without one it has the usual share."""
    slow = msgspec.structs.replace(RATES, cache=0, cache_bandwidth=0.0, efficiency=RATES.efficiency | {SQUARES: 0.5})
    (conv,) = next(y.graph.ops for y in yardsticks() if y.name == "conv")
    usual = cost(conv, measured_cluster(Cluster.local(2)).devices[0]).seconds
    monkeypatch.setattr(local, "_measured", lambda *asked: LocalRates([slow]))
    monkeypatch.setenv("PENSTOCK_CACHE", f"{os.environ['PENSTOCK_CACHE']}-2")
    device = measured_cluster(Cluster.local(2)).devices[0]
    assert cost(conv, device).seconds == pytest.approx(cost_of(conv).flops / (0.5 * slow.flops) + slow.overhead)
    assert usual < cost(conv, device).seconds / 2


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RATES", MEASURED)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    said: list[str] = []
    cluster = measured_cluster(Cluster.local(2), said.append)
    device = cluster.devices[0]
    assert said == [said[0]]
    assert device.source == MEASURED
    assert 1e9 < device.flops < 1e13
    assert 1e8 < device.bandwidth < 1e12
    assert 0 < device.shared_overhead < 0.1
    shares = dict(device.efficiency)
    assert {CONVOLUTIONS, SQUARES, ATTENTION, "elements"} < shares.keys()
    assert all(0.01 < share < 10 for share in shares.values())


@pytest.mark.parametrize(
    "arguments",
    [("--stages", "1"), ("--loss", "mse", "--batch", "8"), ("--plan", "plan.toml", "--loss", "mse")],
    ids=["cut", "searched", "from a file"],
)
def test_errors_of_a_model_are_told_before_anything_is_measured(
    arguments: tuple[str, ...], calls: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path / "none.onnx"), *arguments]) != 0
    assert "none.onnx: no such file" in capsys.readouterr().err
    assert not calls
    # The control: a model that is there.
    model = write_mlp(tmp_path / "mlp.onnx", [8, 8, 8], batch=4)
    if "--plan" not in arguments:
        assert main(["plan", str(model), *arguments]) == 0
        assert len(calls) == 1
