"""Cuts that are chosen where stages have a mesh each: beside the simulation of other cuts, and trained as on one
device."""

from __future__ import annotations

import re

import pytest
from acceptance.sharding import matrix as m

import penstock as ps
from penstock.ir.cluster.cluster import OTHER_HOST, Cluster, Device, LinkClass
from penstock.ir.memory.predict import measure_memory
from penstock.models import write_gpt
from penstock.passes.partition.chain import chain_of
from penstock.passes.partition.devices import StageDevices, on_one_device
from penstock.support.errors import DoesNotFit

TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=16)
FAST, SLOW = (1.25e9, 1e-6), (1.25e8, 5e-5)
MEGATRON = ("preset:megatron",)
# The simulation counts what the sums of seconds leave out: filling, draining and updates, and that messages travel while
# ranks compute. A model of two layers has few places to cut at.
TOLERANCE = 1.13


def cluster_of(count: int, link: tuple[float, float], memory: int | None = None) -> Cluster:
    spaces = () if memory is None else (("ram", memory),)
    devices = tuple(Device(f"cpu:{i}", host=f"h{i}", spaces=spaces) for i in range(count))
    return Cluster(devices, classes=(LinkClass(OTHER_HOST, *link),))


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> ps.Model:
    sizes = {"layers": 2, "width": 128, "heads": 4, "vocab": 256, "positions": 64, "batch": 2}
    return ps.from_onnx(write_gpt(tmp_path_factory.mktemp("gpt") / "gpt.onnx", **sizes))


def planned(model: ps.Model, cluster: Cluster, mesh: str, *cut: str) -> ps.Plan:
    return ps.plan(model, cluster, TRAINING, schedule="1f1b", mesh=mesh, shard=MEGATRON, split_at=cut)


def places(plan: ps.Plan) -> list[str]:
    """Return values at which a second stage can begin."""
    return [op.outs[0].name for op in chain_of(plan.reference)[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "devices", "link", "halves_are_as_good"),
    [
        ("tp=2;tp=1", 3, FAST, False),
        ("tp=4;tp=1", 5, FAST, False),
        ("tp=4;tp=1", 5, SLOW, False),
        ("tp=1;tp=2", 3, FAST, True),
        ("tp=1;tp=2", 3, SLOW, True),
    ],
)
def test_no_other_cut_is_simulated_to_be_much_faster(
    gpt: ps.Model, mesh: str, devices: int, link: tuple[float, float], halves_are_as_good: bool
) -> None:
    cluster = cluster_of(devices, link)
    chosen = planned(gpt, cluster, mesh)
    steps = {name: planned(gpt, cluster, mesh, name).predicted.step for name in places(chosen)}
    assert chosen.predicted.step <= TOLERANCE * min(steps.values())
    # The control: half of the blocks on each stage, as where both have one mesh.
    assert halves_are_as_good or steps["h.0.mlp.residual"] > TOLERANCE * min(steps.values())


def on_first(plan: ps.Plan) -> int:
    """Return the number of operations on the first stage."""
    (text,) = [note.text for note in plan.module.notes if note.text.startswith("stage 0 on ")]
    return int(re.search(r": (\d+) of ", text)[1])


def test_each_stage_has_the_time_and_memory_of_its_own_mesh(gpt: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage on one device gets less than half, and a limit makes it still smaller."""
    first, last = (planned(gpt, cluster_of(3, FAST), mesh) for mesh in ("tp=2;tp=1", "tp=1;tp=2"))
    assert on_first(first) > len(chain_of(first.reference)) / 2
    assert on_first(last) < on_first(first)
    limit = round(0.7 * max(memory.peak for memory in measure_memory(last.module).values()))
    tight = planned(gpt, cluster_of(3, FAST, limit), "tp=1;tp=2")
    assert on_first(tight) < on_first(last)
    assert max(memory.peak for memory in measure_memory(tight.module).values()) <= limit
    # The control: all stages count as on the mesh of the second one.
    monkeypatch.setattr(
        StageDevices, "parts", lambda self, module: [on_one_device(module, (("tp", 2),))] * len(self.groups)
    )
    assert on_first(planned(gpt, cluster_of(3, FAST), "tp=1;tp=2")) > on_first(last)
    with pytest.raises(DoesNotFit):
        planned(gpt, cluster_of(3, FAST, limit), "tp=1;tp=2")


def test_less_is_saved_where_messages_between_meshes_leave_too_little(gpt: ps.Model) -> None:
    """Messages to and from several ranks count where it is chosen what is saved."""
    mesh, cut = "tp=1;tp=2", "h.0.mlp.proj.product"
    free = planned(gpt, cluster_of(3, FAST), mesh, cut)
    peak = max(memory.peak for memory in measure_memory(free.module).values())
    tight = planned(gpt, cluster_of(3, FAST, round(0.9 * peak)), mesh, cut)
    assert max(memory.peak for memory in measure_memory(tight.module).values()) <= 0.9 * peak
    # The control: nothing that is saved can make so much room.
    with pytest.raises(DoesNotFit, match="pass recompute"):
        planned(gpt, cluster_of(3, FAST, round(0.4 * peak)), mesh, cut)


@pytest.mark.parametrize(
    ("schedule", "mesh", "devices", "settings"),
    [
        ("1f1b", "tp=2;tp=1", 3, {}),
        ("2bw", "dp=2,tp=1;dp=2,tp=2", 6, {"zero": 1}),
        ("interleaved", "tp=2;tp=1", 3, {"packs": 2}),
    ],
)
def test_training_is_that_of_one_device(schedule: str, mesh: str, devices: int, settings: dict[str, object]) -> None:
    cluster = ps.Cluster.local(devices)
    plan = ps.plan(m.model(), cluster, m.TRAINING, schedule=schedule, mesh=mesh, shard=MEGATRON, **settings)
    assert len(plan.module.stages) == 2 * settings.get("packs", 1)
    assert m.trained(plan, m.FEW) == pytest.approx(m.on_one_device(schedule)[: m.FEW], rel=1e-6)
