"""Stages on meshes with several axes: devices, teams, and costs of parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Mesh, Module, Op, Value
from penstock.ir.text import parse_module
from penstock.ir.types import parse_type
from penstock.passes.partition.devices import StageDevices, devices_of, mesh_axes, on_one_device
from penstock.passes.partition.partition import PartitionOptions, partition
from penstock.support.errors import UsageError


def _model(split: bool, layers: int = 4) -> Module:
    """Return products, the first half of which is split over tp."""
    x, lines, body = "f32[64,64]", [], []
    for i in range(layers):
        w = f"f32[64,64{'/tp' if split and i < layers // 2 else ''}]"
        lines.append(f"  var @w{i} : {w} param")
        y = "f32[64,64/tp]" if split and i < layers // 2 else x
        body += [f"    %p{i} : {w} = read(@w{i})", f"    %h{i} : {y} = matmul(%{f'h{i - 1}' if i else 'x'}, %p{i})"]
    text = ["module @m {", f"  input %x : {x}", f"  output %h{layers - 1}", *lines, f"  graph @main(%x : {x}) {{"]
    return parse_module("\n".join([*text, *body, f"    return %h{layers - 1}", "  }", "}"]), "m.ir")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("mesh", "each"), [("dp=2,tp=2", 4), ("tp=3", 3), (" tp = 2 , dp = 1", 2), ("dp=2", 2)])
def test_every_stage_gets_a_mesh_with_these_axes(mesh: str, each: int, named: bool) -> None:
    cluster = Cluster.local(2 * each)
    names = [device.name for device in cluster.devices]
    groups = (names[each:], names[:each]) if named else (names[:each], names[each:])
    given = tuple(" ".join(group) for group in groups) if named else ()
    options = PartitionOptions(stages=2, mesh=mesh, devices=given, microbatches=4)
    placed = partition(_model(False).but(cluster=cluster), options)
    axes = mesh_axes(mesh)
    assert placed.meshes == tuple(Mesh(f"s{i}", axes, tuple(group)) for i, group in enumerate(groups))
    assert [stage.place for stage in placed.stages] == ["s0", "s1"]


def test_without_a_mesh_devices_are_replicas() -> None:
    cluster = Cluster.local(3)
    first, *rest = (device.name for device in cluster.devices)
    options = PartitionOptions(devices=(first, " ".join(rest)), microbatches=2)
    placed = partition(_model(False).but(cluster=cluster), options)
    assert placed.meshes == (Mesh("s1", (("dp", 2),), tuple(rest)),)
    one = partition(_model(False).but(cluster=cluster), PartitionOptions(mesh="dp=1,tp=1", stages=3))
    assert one.meshes == ()


@pytest.mark.parametrize("mesh", ["tp", "tp=0", "tp=-1", "tp=2,tp=2", "2=2", "tp=2,", "tp=1.5"])
def test_a_mesh_that_cannot_be_read_is_refused(mesh: str) -> None:
    with pytest.raises(UsageError, match="cannot read the mesh"):
        mesh_axes(mesh)


def test_devices_must_be_as_many_as_the_mesh_needs() -> None:
    cluster = Cluster.local(4)
    names = [device.name for device in cluster.devices]
    with pytest.raises(UsageError, match="stage 1 has 1 device, its mesh 1 x 2 needs 2"):
        devices_of(cluster, (" ".join(names[:2]), names[2]), 0, (), mesh_axes("dp=1,tp=2"))
    with pytest.raises(UsageError, match="3 stages need 6 devices, the cluster has 4"):
        devices_of(cluster, (), 3, (), mesh_axes("tp=2"))
    with pytest.raises(UsageError, match="1 stage need 8 devices, the cluster has 4"):
        devices_of(cluster, (), 0, (), mesh_axes("tp=8"))
    assert len(devices_of(cluster, (), 0, (), mesh_axes("tp=2")).groups) == 2


def test_a_team_goes_by_its_slowest_device_and_least_memory() -> None:
    fast, slow, *others = Cluster.local(4).devices
    group = (
        replace(fast, spaces=(("ram", 1 << 20),)),
        replace(slow, flops=1e9, spaces=(("ram", 1 << 30),)),
        *others,
    )
    first, second = StageDevices((group,), mesh_axes("dp=2,tp=2")).teams()[0]
    assert (first.name, first.flops, first.memory) == (slow.name, 1e9, 1 << 20)
    assert second.flops == others[0].flops
    assert StageDevices((group,)).teams() == [group]


def test_a_split_operation_takes_the_time_of_its_part() -> None:
    """The first four of eight equal products are split: with four ways the cut of two stages lies later than
    without."""
    cluster, options = Cluster.local(8), PartitionOptions(stages=2, mesh="tp=4", microbatches=4)
    placed, plain = (partition(_model(split, 8).but(cluster=cluster), options) for split in (True, False))

    def first_of_second(module: Module) -> int:
        ops = [op for op in module.graphs["main"].ops if op.kind == "matmul"]
        return next(i for i, op in enumerate(ops) if op.attrs["stage"] == 1)

    assert first_of_second(placed) > first_of_second(plain)
    # Nothing but stages is written.
    bare = [op.with_attrs(stage=None) for op in placed.graphs["main"].ops]
    assert bare == list(_model(True, 8).graphs["main"].ops)


def test_parts_for_costs_are_local_types() -> None:
    module = _model(True)
    part = on_one_device(module, mesh_axes("dp=2,tp=3"))
    assert part.vars["w0"].type == parse_type("f32[64,22]")
    assert part.graphs["main"].ops[1].outs == (Value("h0", parse_type("f32[64,22]")),)
    assert [op.kind for op in part.graphs["main"].ops] == [op.kind for op in module.graphs["main"].ops]
    plain = _model(False)
    assert on_one_device(plain, mesh_axes("tp=2")) is plain
    assert isinstance(plain.graphs["main"].ops[0], Op)
