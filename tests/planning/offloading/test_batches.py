"""Plans of batches with something elsewhere: the planner finds stages, and what moves is chosen on top."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.memory.predict import measure_memory
from penstock.models import write_mlp
from penstock.passes.planner.plan import PipelinePlan
from penstock.passes.planner.profile import Profile
from penstock.planning import search
from penstock.planning.explain import argument
from penstock.planning.offloading import batches
from penstock.planning.options import SearchOptions
from penstock.planning.plan import Plan
from penstock.planning.search import _Searching
from penstock.planning.watching import SILENT
from penstock.support.errors import DoesNotFit, UsageError

MIB, BATCH = 1 << 20, 256 * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ps.Model:
    return ps.from_onnx(write_mlp(tmp_path_factory.mktemp("batches") / "mlp.onnx", [512] * 6, batch=256))


def planned(model: ps.Model, mib: int, offload: str, schedules: tuple[str, ...] = ("gpipe",), **settings: str) -> Plan:
    local = Cluster.local(1, threads=(1,))
    device = replace(local.devices[0], spaces=(("ram", mib * MIB),))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3))
    cluster = replace(local, devices=(device,), spaces=(Space("disk"),))
    return ps.plan_best(
        lambda size: model, cluster, training, batch=BATCH, schedules=schedules, offload=offload, **settings
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


def test_reasons_are_those_of_the_search_that_is_told(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one search are refused, and the plan that is taken is of another, after it."""
    local = Cluster.local(3, threads=(1, 1, 1))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3))
    options = SearchOptions(batch=BATCH, schedules=("1f1b", "gpipe"), explained=False)
    searching = _Searching(local, training, options, SILENT, {256: model})
    plan = searching.plan()
    assert plan.search is not None
    outcomes = plan.search.result.outcomes
    fast, other = outcomes["1f1b"], outcomes["gpipe"]
    few = replace(other, plan=replace(other.plan, zero=1))
    kept = {few.plan}

    def carried_out(one: PipelinePlan, profile: Profile) -> Plan:
        if one not in kept:
            raise DoesNotFit(f"too large: {one.schedule}")
        return plan

    monkeypatch.setattr(searching, "carried_out", carried_out)
    searching.tried.clear()
    assert searching._first(plan.search, [("1f1b", fast, []), ("gpipe", other, [])]) is None
    taken = searching._first(plan.search, [("gpipe", other, []), ("gpipe", few, [])])
    assert taken is not None
    assert taken.search is not None
    # 1f1b was refused before this search, which has no plan of it; gpipe was not refused again, but is known to be.
    assert taken.search.refused.keys() == {"gpipe"}
    assert "too large: gpipe" in taken.search.refused["gpipe"]


def test_plans_that_moves_do_not_make_fit_are_named_with_the_reason(
    model: ps.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest schedule is refused as it is carried out with moves, so the next one is taken."""
    real = _Searching.carried_out

    def carried_out(self: _Searching, one: PipelinePlan, profile: Profile) -> Plan:
        if self.options.offload != "none" and one.schedule == fastest:
            raise DoesNotFit("spaces are full")
        return real(self, one, profile)

    device = replace(Cluster.local(1, threads=(1,)).devices[0], spaces=(("ram", 90 * MIB),))
    cluster = Cluster((device,), spaces=(Space("disk"),))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3))
    settings = {"batch": BATCH, "schedules": ("1f1b", "gpipe"), "offload": "state"}
    first = ps.plan_best(lambda size: model, cluster, training, **settings)
    assert first.search is not None
    fastest = first.search.plan.schedule
    monkeypatch.setattr(_Searching, "carried_out", carried_out)
    plan = ps.plan_best(lambda size: model, cluster, training, **settings)
    assert plan.search is not None
    assert plan.search.plan.schedule != fastest
    assert [(kind, "spaces are full" in reason) for kind, reason in plan.search.refused.items()] == [(fastest, True)]
    # The control: nothing was refused where that schedule was taken.
    assert not first.search.refused


def test_where_weights_move_devices_have_three_stages_or_more(tmp_path, monkeypatch) -> None:
    """Of schedules of packs alone, with those that move weights the least among them. The control: where they stay,
    these are not looked at."""
    looked_at = list[tuple[str, ...]]()
    usual = search.pack

    def told(planner, cluster, kinds, orders, fewest, below):
        looked_at.append((*kinds, str(fewest)))
        return usual(planner, cluster, kinds, orders, fewest, below)

    monkeypatch.setattr(search, "pack", told)
    deep = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [512] * 13, batch=16))
    local = Cluster.local(2, threads=(1, 1))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3))

    def planned(mib: int, **settings: object) -> Plan:
        devices = tuple(replace(device, spaces=(("ram", mib * MIB),)) for device in local.devices)
        cluster = replace(local, devices=devices, spaces=(Space("disk"),))
        return ps.plan_best(
            lambda size: deep, cluster, training, batch=16 * 8, explained=False, shard="none", **settings
        )

    with pytest.raises(DoesNotFit):
        planned(18)
    assert looked_at == []
    plan = planned(18, offload="weights")
    assert {*looked_at} == {("interleaved", "wrap", "3")}
    assert plan.module.schedule.name == "wrap"
    assert [len(stages) for stages in plan.module.rank_packs()] == [3, 3]
    assert max(row.peak for row in measure_memory(plan.module).values()) <= 18 * MIB
    assert any(action.item == "w" for action in plan.module.schedule.actions())
    # With less memory there are more stages on each.
    plan = planned(14, offload="weights", schedules=("wrap",))
    assert [len(stages) for stages in plan.module.rank_packs()] == [4, 4]
    assert max(row.peak for row in measure_memory(plan.module).values()) <= 14 * MIB
    planned(64)
    assert looked_at[-1] == ("interleaved", "zb-v", "1")


def test_weights_move_on_one_device_too(model: ps.Model) -> None:
    """The control: more than there is of the device without."""
    with pytest.raises(DoesNotFit):
        planned(model, 44, "state")
    plan = planned(model, 44, "weights", schedules=("interleaved", "wrap"))
    (stages,) = plan.module.rank_packs()
    assert len(stages) >= 3
    assert measure_memory(plan.module)[0].peak <= 44 * MIB


@pytest.mark.parametrize(
    ("asked", "offload", "searched"),
    [
        (("1f1b", "interleaved", "wrap"), "none", ("1f1b", "interleaved")),
        (("1f1b", "wrap"), "none", ("1f1b", "wrap")),
        (("zb-v", "wrap"), "none", ("zb-v", "wrap")),
        (("interleaved-2bw", "wrap", "wrap-2bw"), "none", ("interleaved-2bw", "wrap")),
        (("1f1b", "zb-v", "interleaved", "wrap"), "weights", ("interleaved", "wrap")),
        (("1f1b",), "all", ("1f1b",)),
        (("strange", "interleaved"), "weights", ("strange", "interleaved")),
    ],
)
def test_schedules_to_search(asked: tuple[str, ...], offload: str, searched: tuple[str, ...]) -> None:
    assert batches.schedules_to_search(SearchOptions(batch=8, schedules=asked, offload=offload)) == searched
