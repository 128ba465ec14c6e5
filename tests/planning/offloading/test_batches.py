"""Plans of batches with something elsewhere: the planner finds stages, and what moves is chosen on top."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Space
from penstock.ir.memory.predict import measure_memory
from penstock.models import write_mlp
from penstock.planning.explain import argument
from penstock.planning.offloading import batches
from penstock.planning.plan import Plan
from penstock.support.errors import DoesNotFit, UsageError

MIB, BATCH = 1 << 20, 256 * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ps.Model:
    return ps.from_onnx(write_mlp(tmp_path_factory.mktemp("batches") / "mlp.onnx", [512] * 6, batch=256))


def planned(model: ps.Model, mib: int, offload: str, **settings: str) -> Plan:
    local = Cluster.local(1, threads=(1,))
    device = replace(local.devices[0], spaces=(("ram", mib * MIB),))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3))
    cluster = replace(local, devices=(device,), spaces=(Space("disk"),))
    return ps.plan_best(
        lambda size: model, cluster, training, batch=BATCH, schedules=("gpipe",), offload=offload, **settings
    )


def test_a_batch_that_fits_nowhere_else_fits_with_moves(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DoesNotFit):
        planned(model, 52, "none")
    plan = planned(model, 52, "auto")
    assert measure_memory(plan.module)[0].peak <= 52 * MIB
    assert (plan.as_dict()["offload"], plan.module.schedule is not None) == ("state", True)
    assert plan.search is not None
    told = list(argument(plan.search))
    assert any("its estimates of memory are up to 50% more" in line for line in told)
    # That search was for other devices, with which nothing can be compared.
    assert (plan.search.what_if, [row.effect for row in plan.search.contributions]) == ([], ["unknown"])
    assert not [line for line in told if "what if" in line or "one thing changed" in line]
    assert planned(model, 52, "state").module == plan.module
    # The control: a search that knows the memory of the devices alone sees no such plan.
    monkeypatch.setattr(batches, "MULTIPLES", (1.0,))
    with pytest.raises(DoesNotFit):
        planned(model, 52, "auto")


def test_where_everything_fits_the_plan_is_that_without(model: ps.Model) -> None:
    assert planned(model, 90, "auto").module == planned(model, 90, "none").module


def test_the_nearest_plan_is_named_where_none_fits(model: ps.Model) -> None:
    with pytest.raises(DoesNotFit, match="by moving optimiser state and recomputing: cpu:0 would need") as raised:
        planned(model, 20, "auto")
    (need,) = raised.value.needs.values()
    assert need < measure_memory(planned(model, 90, "none").module)[0].peak
    with pytest.raises(UsageError, match="--spill says where"):
        planned(model, 90, "none", spill="/tmp/")


def test_a_schedule_that_moves_nothing_hides_no_other(model: ps.Model) -> None:
    local = Cluster.local(2, threads=(1, 1))
    devices = tuple(replace(device, spaces=(("ram", 36 * MIB),)) for device in local.devices)
    cluster = replace(local, devices=devices, spaces=(Space("disk"),))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3))

    def best(*schedules: str) -> Plan:
        return ps.plan_best(
            lambda size: model, cluster, training, batch=BATCH, schedules=schedules, offload="activations"
        )

    with pytest.raises(UsageError, match="nothing would be gained"):
        best("1f1b")
    assert best("gpipe", "1f1b").module == best("gpipe").module
