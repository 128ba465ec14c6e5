"""The spaces that plans give devices without one: files for CPUs, memory of the host for GPUs. And what copies cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import RAM, Space, SpaceWay
from penstock.models import write_mlp
from penstock.passes.manager import Call
from penstock.passes.memory.offload import OffloadOptions
from penstock.planning.pipeline import HOST_MEMORY, SPILL
from penstock.planning.plan import Plan
from penstock.planning.predict import predict
from penstock.planning.replan import _moving_less
from penstock.support.errors import UsageError

TRAINING = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ps.Model:
    return ps.from_onnx(write_mlp(tmp_path_factory.mktemp("spaces") / "mlp.onnx", [256] * 11, batch=64))


def planned(model: ps.Model, cluster: Cluster, **settings: str) -> Plan:
    return ps.plan(
        model, cluster, TRAINING, schedule="1f1b", split_at=["fc6.product"], **{"offload": "state", **settings}
    )


def homes(plan: Plan) -> set[str]:
    return {var.home for var in plan.module.vars.values() if var.home}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [("sm_90,sm_90", {HOST_MEMORY}), ("cpu,sm_90", {SPILL, HOST_MEMORY}), ("cpu,cpu", {SPILL})],
)
def test_each_kind_of_device_gets_a_space(model: ps.Model, devices: str, expected: set[str]) -> None:
    plan = planned(model, Cluster.listed(devices))
    assert homes(plan) == expected
    assert plan.module.cluster is not None
    assert {space.name for space in plan.module.cluster.spaces} == expected
    # The control: nothing is added where nothing moves.
    kept = planned(model, Cluster.listed(devices), offload="none")
    assert kept.module.cluster is not None
    assert not kept.module.cluster.spaces


def test_a_folder_is_for_the_processors(model: ps.Model, tmp_path: Path) -> None:
    plan = planned(model, Cluster.listed("cpu,sm_90"), spill=f"{tmp_path}/")
    assert homes(plan) == {SPILL, HOST_MEMORY}
    assert plan.module.cluster is not None
    assert {space.path for space in plan.module.cluster.spaces} == {"", f"{tmp_path}/"}
    assert plan.as_dict()["spill"] == f"{tmp_path}/"
    with pytest.raises(UsageError, match="reaches no memory space 'disk' of kind 'ram'"):
        planned(model, Cluster.listed("sm_90,sm_90"), spill=f"{tmp_path}/")


def test_a_space_of_the_file_counts(model: ps.Model) -> None:
    own = Space.from_fields("dram", {"kind": RAM, "bytes": 1 << 40})
    cluster = replace(Cluster.listed("sm_90,sm_90"), spaces=(Space("disk"), own))
    assert homes(planned(model, cluster)) == {"dram"}
    assert homes(planned(model, cluster, spill="dram")) == {"dram"}


def test_the_rate_of_a_way_is_that_of_its_copies(model: ps.Model) -> None:
    """GPUs that share a bus take longer than two with ways of their own, and those slower than with the rate of
    host-to-device. Copies are most of these batches."""
    whole = Cluster.listed("sm_90,sm_90")
    dram = Space.from_fields("dram", {"kind": RAM})
    names = [device.name for device in whole.devices]

    def seconds(*ways: SpaceWay) -> float:
        return predict(planned(model, replace(whole, spaces=(dram,), ways=ways)).module).step

    usual = seconds()
    apart = seconds(*(SpaceWay(name, "dram", 1e8) for name in names))
    shared = seconds(*(SpaceWay(name, "dram", 1e8, nic="bus") for name in names))
    assert seconds(*(SpaceWay(name, "dram", 1e10, 5e-5) for name in names)) == usual
    assert usual < 0.5 * apart
    assert apart < 0.8 * shared


def test_spaces_of_the_file_come_first_and_devices_without_one_get_one(model: ps.Model, tmp_path: Path) -> None:
    """A bound that a host states is not passed by, and a name that is in use is no name of another folder."""
    devices = [replace(d, host=host) for d, host in zip(Cluster.listed("sm_90,sm_90").devices, "ab", strict=True)]
    own = Space.from_fields("dram", {"kind": RAM, "host": "a", "bytes": 1 << 40})
    plan = planned(model, Cluster(tuple(devices), spaces=(own,)))
    assert homes(plan) == {"dram", HOST_MEMORY}
    # A space that GPUs reach is none for the processor beside them.
    mixed = replace(Cluster.listed("cpu,sm_90"), spaces=(replace(own, host=""),))
    assert homes(planned(model, mixed, spill="dram")) == {SPILL, "dram"}
    known = replace(Cluster.listed("cpu,cpu"), spaces=(Space(SPILL, path="/elsewhere"),))
    plan = planned(model, known, spill=f"{tmp_path}/")
    assert homes(plan) == {f"{SPILL}-2"}
    assert plan.as_dict()["spill"] == f"{tmp_path}/"


def test_a_folder_that_no_stage_uses_stays_in_the_plan(tmp_path: Path) -> None:
    """The processor has nothing that could go; the plan can be taken up again all the same."""
    small = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [8, 8, *[256] * 7], batch=64))
    cluster = Cluster.listed("cpu,sm_90")
    settings = {"schedule": "1f1b", "split_at": ["fc2.product"], "offload": "state"}
    plan = ps.plan(small, cluster, TRAINING, spill=f"{tmp_path}/", **settings)
    assert homes(plan) == {HOST_MEMORY}
    assert plan.as_dict()["spill"] == f"{tmp_path}/"
    again = ps.plan(small, cluster, TRAINING, **settings, spill=plan.as_dict()["spill"])
    assert again.module == plan.module


def test_a_plan_that_is_made_anew_keeps_its_space_first() -> None:
    """Then any that devices reach, then less in either, then nothing elsewhere. Nothing is tried twice."""

    def tried(space: str) -> list[tuple[str, str]]:
        calls = [Call("offload", OffloadOptions(space, "both"))]
        return [(c.options.what, c.options.space) for listed in _moving_less(calls) for c in listed]

    kinds = ("both", "state", "activations")
    assert tried("far") == [(kind, space) for kind in kinds for space in ("far", "")]
    assert tried("") == [(kind, "") for kind in kinds]
