"""What forwards saved, elsewhere and made again in one plan: chosen where neither alone fits, and refused for a byte
less."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.memory.predict import memory_curve
from penstock.ir.memory.saved_sets import moves_saved
from penstock.models import write_mlp
from penstock.planning.explain import plan_lines
from penstock.planning.plan import Plan
from penstock.support.errors import DoesNotFit, PenstockError

# Without state of an optimiser there is nothing else that could move.
TRAINING = ps.Training(loss="mse", optimizer=ps.SGD(lr=1e-3), microbatches=8)
ALONE = (("none", "auto"), ("none", "all"), ("activations", "none"))


def planned(model: ps.Model, memory: int, offload: str, recompute: str) -> Plan:
    local = Cluster.local(1, threads=(1,))
    devices = tuple(replace(device, spaces=(("ram", memory),)) for device in local.devices)
    cluster = replace(local, devices=devices, spaces=(Space("disk", bandwidth=1e9),))
    return ps.plan(model, cluster, TRAINING, schedule="gpipe", offload=offload, recompute=recompute)


def need(model: ps.Model, offload: str, recompute: str) -> int:
    with pytest.raises(DoesNotFit) as raised:
        planned(model, 1, offload, recompute)
    return raised.value.needs["cpu:0"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[ps.Model, int]:
    """A model of so many layers that both fates together need less than either, and what they need."""
    folder = tmp_path_factory.mktemp("fates")
    for layers in (8, 16, 24, 32):
        model = ps.from_onnx(write_mlp(folder / f"mlp{layers}.onnx", [8, *[64] * layers, 8], batch=64))
        both = need(model, "activations", "auto")
        if both < min(need(model, *settings) for settings in ALONE):
            return model, both
    raise AssertionError("no model was found")


def test_both_fates_are_chosen_where_neither_alone_fits(deep: tuple[ps.Model, int]) -> None:
    model, memory = deep
    plan = planned(model, memory, "auto", "auto")
    assert plan.prices is not None
    assert plan.prices.chosen is not None
    assert (plan.prices.chosen.offload, plan.prices.chosen.recompute) == ("activations", "auto")
    assert plan.module == planned(model, memory, "activations", "auto").module
    assert max(held for *_, held in memory_curve(plan.module, 0, 3)) <= memory
    assert any(moves_saved(action) for action in plan.module.schedule.actions())
    assert any("recompute" in op.attrs for graph in plan.module.graphs.values() for op in graph.ops)
    (line,) = [line for line in plan_lines(plan) if line.startswith("offload: fits by ")]
    assert line.startswith("offload: fits by moving what forwards saved and recomputing: ")
    for settings in ALONE:
        with pytest.raises(DoesNotFit):
            planned(model, memory, *settings)


def test_a_byte_less_is_refused(deep: tuple[ps.Model, int]) -> None:
    model, memory = deep
    with pytest.raises(DoesNotFit) as raised:
        planned(model, memory - 1, "auto", "auto")
    assert raised.value.needs == {"cpu:0": memory}
    assert "does not fit by moving what forwards saved and recomputing: cpu:0 would need" in raised.value.what
    with pytest.raises(DoesNotFit):
        planned(model, memory - 1, "activations", "auto")


def test_both_fates_are_priced_where_one_alone_fits(deep: tuple[ps.Model, int]) -> None:
    """The notes say what is elsewhere of the values that are left, not of all that were saved before."""
    model, _ = deep
    more = need(model, "activations", "none") - 1
    prices = planned(model, more, "auto", "auto").prices
    assert prices is not None
    mixed = [price for price in prices.tried if (price.offload, price.recompute) == ("activations", "auto")]
    assert [(price.step is not None, price.again) for price in mixed] == [(True, True)]
    module = planned(model, more, "activations", "auto").module
    (note,) = [note.text for note in module.notes if note.origin == "offload"]
    forward = module.graphs["s0.F"]
    moved = sum(v.type.nbytes for v in forward.saved if v not in (*forward.ins, *forward.outs))
    assert note.startswith("rank 0: what stage 0 saves of ")
    assert f" {moved / 1024:.1f} KiB of each" in note
    with pytest.raises(PenstockError, match="nothing would be gained"):
        planned(model, more, "activations", "all")
