"""The choice of `--offload auto` against all settings by themselves: each planned as if it were asked for, simulated, and
its memory counted block by block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.cluster.gpus import CONTEXT, WORKSPACES
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.memory.predict import memory_curve
from penstock.models import write_mlp
from penstock.passes.memory.recompute import MODES
from penstock.planning.explain import plan_lines
from penstock.planning.offloading.prices import FatePrice, FatePrices
from penstock.planning.options import OFFLOADS
from penstock.planning.plan import Plan
from penstock.planning.plan_file import load_plan_file
from penstock.planning.predict import predict
from penstock.support.errors import DoesNotFit, PenstockError, UsageError

MIB = 1 << 20
# Steps that differ by less are as fast.
SAME = 5e-4
TRAINING = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ps.Model:
    return ps.from_onnx(write_mlp(tmp_path_factory.mktemp("auto") / "mlp.onnx", [512] * 6, batch=256))


def cluster(nbytes: int, bandwidth: float = 1e9) -> Cluster:
    local = Cluster.local(1, threads=(1,))
    devices = tuple(replace(device, spaces=(("ram", nbytes),)) for device in local.devices)
    return replace(local, devices=devices, spaces=(Space("disk", bandwidth=bandwidth),))


def planned(model: ps.Model, nbytes: int, offload: str, bandwidth: float = 1e9, recompute: str = "auto") -> Plan:
    settings = {"schedule": "gpipe", "offload": offload, "recompute": recompute}
    return ps.plan(model, cluster(nbytes, bandwidth), TRAINING, **settings)


def peak(module: Module) -> int:
    """Count the most bytes of the rank, action by action."""
    return max(held for *_, held in memory_curve(module, 0, 3))


def every_setting(model: ps.Model, nbytes: int, bandwidth: float) -> Iterator[tuple[float, str, str]]:
    """Yield seconds and settings of each plan that fits."""
    for offload, recompute in product(OFFLOADS, MODES):
        try:
            module = planned(model, nbytes, offload, bandwidth, recompute).module
        except PenstockError:
            continue
        if peak(module) <= nbytes:
            yield predict(module).step, offload, recompute


@pytest.mark.parametrize(("mib", "bandwidth", "moves"), [(59, 1e9, "both"), (52, 1e9, "state"), (56, 2e7, "none")])
def test_the_fastest_that_fits_is_taken(model: ps.Model, mib: int, bandwidth: float, moves: str) -> None:
    plan = planned(model, mib * MIB, "auto", bandwidth)
    assert plan.prices is not None
    assert plan.prices.chosen is not None
    fitting = sorted(every_setting(model, mib * MIB, bandwidth))
    chosen = plan.prices.chosen
    assert predict(plan.module).step <= fitting[0][0] * (1 + SAME)
    assert (chosen.offload, chosen.recompute) in {(offload, mode) for _, offload, mode in fitting}
    assert peak(plan.module) <= mib * MIB
    assert chosen.offload == moves
    again = planned(model, mib * MIB, chosen.offload, bandwidth, chosen.recompute)
    assert plan.module == again.module
    # Prices are those of the plans by themselves.
    steps = {(price.offload, price.recompute): price.step for price in plan.prices.tried if price.step is not None}
    assert steps.items() <= {(offload, mode): step for step, offload, mode in fitting}.items()
    assert len(steps) == len(fitting)


def test_control_slower_and_smaller_lead_to_another_choice(model: ps.Model) -> None:
    """A choice that did not look at bandwidth or bytes would be the same in each pair."""
    assert chosen_at(model, 56 * MIB, 2e7) == "recomputing" != chosen_at(model, 56 * MIB, 1e9)
    needed = peak(planned(model, 63 * MIB, "auto").module)
    assert chosen_at(model, needed) == "moving what forwards saved" != chosen_at(model, needed - 1)


def chosen_at(model: ps.Model, nbytes: int, bandwidth: float = 1e9) -> str:
    """Return what the plan does where a device has so many bytes."""
    prices = planned(model, nbytes, "auto", bandwidth).prices
    assert prices is not None
    assert prices.chosen is not None
    return prices.chosen.words


def test_where_nothing_fits_the_least_of_each_kind_is_named(model: ps.Model) -> None:
    with pytest.raises(DoesNotFit) as raised:
        planned(model, 20 * MIB, "auto")
    lines = raised.value.what.splitlines()
    for words in ("by recomputing: cpu:0 would need", "by moving optimiser state and recomputing: cpu:0 would need"):
        assert sum(words in line for line in lines) == 1
    assert sum("it has 20.0 MiB" in line for line in lines) == 4
    assert any("no plan by moving weights and their state" in line for line in lines)
    # What is named is what the kind needs: with so much there is a plan, with less there is none.
    need = min(planned_need(model, 20 * MIB, kind) for kind in ("none", "state", "activations", "both"))
    assert raised.value.needs == {"cpu:0": need}
    assert planned(model, need, "auto").prices is not None
    with pytest.raises(DoesNotFit):
        planned(model, need - 1, "auto")


def test_memory_that_is_named_is_enough_beside_spaces_with_little_room(model: ps.Model) -> None:
    """State does not fit into such a space, so no memory of the device makes a plan that moves it."""

    def planned_beside(nbytes: int, room: int) -> Plan:
        of_device = cluster(nbytes)
        spaces = tuple(replace(space, bytes=room) for space in of_device.spaces)
        return ps.plan(model, replace(of_device, spaces=spaces), TRAINING, schedule="gpipe", offload="auto")

    needs = {}
    for room in (0, 4 * MIB):
        with pytest.raises(DoesNotFit) as raised:
            planned_beside(20 * MIB, room)
        (needs[room],) = raised.value.needs.values()
        assert planned_beside(needs[room], room).prices is not None
        with pytest.raises(DoesNotFit):
            planned_beside(needs[room] - 1, room)
        assert ("no plan by moving optimiser state: is home to " in raised.value.what) == bool(room)
    # The control: memory that is enough where the space has no limit.
    with pytest.raises(DoesNotFit):
        planned_beside(needs[0], 4 * MIB)


def planned_need(model: ps.Model, nbytes: int, offload: str) -> int:
    with pytest.raises(DoesNotFit) as raised:
        planned(model, nbytes, offload)
    return raised.value.needs["cpu:0"]


def test_a_gpu_has_no_room_where_cuda_and_its_libraries_are(model: ps.Model) -> None:
    """The default, `auto` and `--recompute none` agree on what a GPU holds."""
    most = peak(planned(model, 90 * MIB, "none").module)

    def on_gpu(left: int, offload: str, recompute: str = "auto") -> Plan:
        memory = (("vram", CONTEXT + WORKSPACES + left),)
        device = Device("cuda:0", kind="cuda", target="sm_90", flops=1e13, bandwidth=1e12, spaces=memory)
        settings = {"schedule": "gpipe", "offload": offload, "recompute": recompute}
        return ps.plan(model, Cluster((device,), spaces=(Space("disk"),)), TRAINING, **settings)

    for settings in (("none", "auto"), ("none", "none"), ("auto", "auto"), ("auto", "none")):
        assert peak(on_gpu(most, *settings).module) <= most
        with pytest.raises(DoesNotFit) as raised:
            on_gpu(10 * MIB, *settings)
        need = raised.value.needs["cuda:0"] - CONTEXT - WORKSPACES
        assert "it has 778.0 MiB" in raised.value.what
        assert 10 * MIB < peak(on_gpu(need, *settings).module) <= need
        with pytest.raises(DoesNotFit):
            on_gpu(need - 1, *settings)


def test_prices_are_told_and_kept(model: ps.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(model, 52 * MIB, "auto")
    lines = [line for line in plan_lines(plan) if line.startswith("offload: ")]
    kept = peak(planned(model, 90 * MIB, "auto").module) / MIB
    assert f"everything kept; cpu:0 would need {kept:.1f} MiB, it has 52.0 MiB" in lines[0]
    assert lines[1].startswith("offload: fits by moving optimiser state and recomputing: ")
    assert lines[1].endswith(" slower; chosen")
    assert sum("; chosen" in line for line in lines) == 1
    told = plan.as_dict()["prices"]
    assert [row["offload"] for row in told["tried"] if row["chosen"]] == ["state"]
    assert told["everything_kept"]["step_s"] < plan.predicted.step
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    options, _ = load_plan_file(path, ["cpu:0"])
    assert (options["offload"], options["recompute"]) == ("state", "auto")
    assert "prices" not in json.loads(planned(model, 90 * MIB, "none").to_json())


def test_the_chosen_plan_is_named_where_another_is_as_fast() -> None:
    free = FatePrice("none", "none", 1.0, {"cpu:0": 100})
    chosen = FatePrice("state", "auto", 1.2003, {"cpu:0": 50}, again=True)
    other = FatePrice("state", "all", 1.2, {"cpu:0": 40}, again=True)
    told = {pick.step: [*FatePrices({"cpu:0": 60}, free, [chosen, other], pick).lines()][1] for pick in (chosen, other)}
    assert told == dict.fromkeys(told, "offload: fits by moving optimiser state and recomputing: 20.0% slower; chosen")


def test_what_is_no_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_mlp(tmp_path / "mlp.onnx", [8, 8], batch=2)
    with pytest.raises(UsageError, match="moves what a training holds"):
        ps.plan(ps.from_onnx(path), Cluster.local(1), offload="auto")
    assert main(["plan", str(path), "--offload", "auto"]) == 2
    assert "compile with --loss" in capsys.readouterr().err
