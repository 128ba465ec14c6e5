"""Stages with a mesh each: a team of two ranks sends whole values to one rank, and one rank to a team of two. What is
split is gathered before it leaves, or travels in parts to a team of as many ranks.

Ranks are processes with the NumPy back end. The oracle is a training of the same schedule on one device. What the
checker refuses are the same plans with a message left out, or with one too many.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from acceptance.sharding import matrix as m
from acceptance.sharding.changed_schedules import wired_problems

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.commands.parser import main
from penstock.ir.ops import make
from penstock.ir.sharding.between_meshes import travels_in_tiles
from penstock.ir.verify.layouts import check_local
from penstock.models import write_gpt
from penstock.passes.sharding.crossings import arrivals
from penstock.passes.sharding.given import mesh_text
from penstock.planning.replan import replan

CUT, MEGATRON = ("h.1.mlp.residual",), ("preset:megatron",)
MESHES = ("tp=2;tp=1", "tp=1;tp=2")


def trained(plan: ps.Plan) -> list[float]:
    return m.trained(plan, m.FEW)


def _plan(mesh: str, schedule: str = "1f1b", **settings: object) -> ps.Plan:
    given = {"split_at": CUT, "shard": ("preset:megatron",), **settings}
    return ps.plan(m.model(), ps.Cluster.local(3), m.TRAINING, schedule=schedule, stages=2, mesh=mesh, **given)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw"])
@pytest.mark.parametrize("mesh", MESHES)
def test_training_is_that_of_one_device(mesh: str, schedule: str) -> None:
    assert trained(_plan(mesh, schedule)) == pytest.approx(m.on_one_device(schedule)[: m.FEW], rel=1e-6)


def _tied(folder: Path) -> ps.Model:
    """The model of the matrix, whose head reads the table of words."""
    sizes = {"layers": 4, "width": 16, "heads": 2, "vocab": m.VOCABULARY, "positions": m.POSITIONS, "batch": m.BATCH}
    model = onnx.load(write_gpt(folder / "gpt.onnx", **sizes))
    place, head = next((i, node) for i, node in enumerate(model.graph.node) if "lm_head.weight" in node.input)
    head.input[list(head.input).index("lm_head.weight")] = "turned"
    model.graph.node.insert(place, onnx.helper.make_node("Transpose", ["wte.weight"], ["turned"], perm=[1, 0]))
    onnx.save(model, folder / "tied.onnx")
    return ps.from_onnx(folder / "tied.onnx")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("what", ["clip", "tied"])
def test_what_stages_exchange_once_a_batch_is_there_on_all_ranks(what: str, mesh: str, tmp_path: Path) -> None:
    """The norm of the gradient, and gradients of a parameter that both stages read."""
    model = m.model() if what == "clip" else _tied(tmp_path)
    training = replace(m.TRAINING, clip=0.05) if what == "clip" else m.TRAINING
    settings = {"split_at": CUT, "shard": ("preset:megatron",), "mesh": mesh, "stages": 2}
    plan = ps.plan(model, ps.Cluster.local(3), training, schedule="1f1b", **settings)
    alone = ps.plan(model, ps.Cluster.local(1), training, schedule="1f1b", stages=1)
    assert trained(plan) == pytest.approx(trained(alone), rel=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_views_and_exports_name_the_mesh_of_each_stage(mesh: str, tmp_path: Path) -> None:
    bundle = ps.compile(_plan(mesh), tmp_path / "b", backend="numpy")
    assert mesh_text(open_bundle(bundle).module) == mesh
    for view in ("--sharding", "--links", "--memory"):
        assert main(["inspect", str(bundle), view]) == 0
    assert main(["verify", str(bundle), "--steps", "2"]) == 0
    assert main(["export", str(bundle), "--onnx", str(tmp_path / "trained.onnx")]) == 0
    (configuration,) = onnx.load(tmp_path / "trained.onnx").configuration
    assert (configuration.name, configuration.num_devices) == (mesh, 3)


# Cut where a layer is split, and given layouts that say so on both sides.
INSIDE = ("h.1.mlp.fc",)
OTHER_AXIS = (*MEGATRON, "h.1.mlp.gelu=[_,_,/sp]")


def _split(mesh: str, devices: int, folder: Path, cut: tuple[str, ...], **settings: object) -> tuple[ps.Plan, ps.Plan]:
    """Return the plan of a GPT of six heads, and that of one device."""
    schedule = settings.pop("schedule", "1f1b")
    sizes = {
        "layers": settings.pop("layers", 2),
        "width": 24,
        "heads": 6,
        "vocab": m.VOCABULARY,
        "positions": m.POSITIONS,
        "batch": m.BATCH,
    }
    model = ps.from_onnx(write_gpt(folder / "six.onnx", **sizes))
    given = {"split_at": cut, "shard": MEGATRON, "mesh": mesh, "stages": 2, **settings}
    plan = ps.plan(model, ps.Cluster.local(devices), m.TRAINING, schedule=schedule, **given)
    return plan, ps.plan(model, ps.Cluster.local(1), m.TRAINING, schedule="1f1b", stages=1)


@pytest.mark.parametrize(
    ("mesh", "devices", "shard", "forward", "backward"),
    [
        ("tp=2;tp=1", 3, MEGATRON, "f32[2,8,96/tp]", "f32[2,8,96/tp]"),
        ("tp=1;tp=2", 3, MEGATRON, "f32[2,8,96/tp]", "f32[2,8,96/tp]"),
        ("tp=2;tp=3", 5, MEGATRON, "f32[2,8,96/tp]", "f32[2,8,96/tp]"),
        ("tp=2;sp=2", 4, OTHER_AXIS, "f32[2,8,48]", "f32[2,8,48]"),
        ("dp=2,tp=2;dp=2,sp=2", 8, OTHER_AXIS, "f32[2,8,48]", "f32[2,8,48]"),
        # The same axis: at the same coordinate at all places, and at others.
        ("tp=2;sp=2,tp=2", 6, MEGATRON, "f32[2,8,48]", "f32[2,8,48]"),
        ("tp=2;tp=2,sp=2", 6, MEGATRON, "f32[2,8,96/tp]", "f32[2,8,96/tp]"),
        ("tp=2,sp=2;sp=2,tp=2", 8, MEGATRON, "f32[2,8,96/tp]", "f32[2,8,96/tp]"),
    ],
)
def test_split_values_arrive_on_other_meshes(
    mesh: str, devices: int, shard: tuple[str, ...], forward: str, backward: str, tmp_path: Path
) -> None:
    """Ranks of as many at both ends have parts at the same places, and send these alone. `verify` compares every value
    of every rank with the whole program."""
    plan, alone = _split(mesh, devices, tmp_path, INSIDE, shard=shard)
    edges = {edge.phase: {value.name: str(value.type) for value in edge.values} for edge in plan.module.edges}
    assert [t for name, t in edges["F"].items() if "mlp.fc" in name] == [forward]
    assert [t for name, t in edges["B"].items() if "mlp.fc" in name] == [backward]
    assert trained(plan) == pytest.approx(trained(alone), rel=1e-6)
    assert main(["verify", str(ps.compile(plan, tmp_path / "b", backend="numpy")), "--steps", "1"]) == 0


def test_parts_of_ranks_at_the_same_places_make_the_same_bits_as_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second plan no part is taken as it is, and each rank is sent the tiles that it needs."""
    cut = ("h.0.mlp.residual",)
    parts, _ = _split("tp=2;sp=2", 4, tmp_path, cut, shard=(*MEGATRON, "h.0.mlp.residual=[_,/sp,/tp]"))
    monkeypatch.setattr(arrivals, "_at_places", lambda t, source, target: None)
    tiles, _ = _split("tp=2;sp=2", 4, tmp_path, cut, shard=(*MEGATRON, "h.0.mlp.residual=[_,/sp,/tp]"))
    assert not any(map(travels_in_tiles, parts.module.edges))
    assert all(map(travels_in_tiles, tiles.module.edges))
    assert trained(parts) == trained(tiles)


def test_checker_refuses_parts_left_out_and_swapped(tmp_path: Path) -> None:
    plan, _ = _split("tp=2;sp=2", 4, tmp_path, INSIDE, shard=OTHER_AXIS)
    assert not wired_problems(plan, {})
    sends = [str(a) for a in plan.module.schedule.ranks[0].batch if a.kind == "SF"]
    assert "never sends this message" in wired_problems(plan, {f"0 {sends[0]}": ()})
    straight, swapped = {0: 2, 1: 3, 2: 0, 3: 1}, {0: 3, 1: 2, 2: 1, 3: 0}
    numbers = range(m.MICROBATCHES, 2 * m.MICROBATCHES)
    changed = {f"{r} 0SF{k}>{straight[r]}": (f"0SF{k}>{swapped[r]}",) for r in (0, 1) for k in numbers}
    changed |= {f"{r} 1RF{k}<{straight[r]}": (f"1RF{k}<{swapped[r]}",) for r in (2, 3) for k in numbers}
    assert "comes from place 1 of its team, which may have another part" in wired_problems(plan, changed)


def test_checker_refuses_senders_that_change_from_one_microbatch_to_another(tmp_path: Path) -> None:
    """What a rank sends to another is the same for all microbatches of a team. Of each part there are two, on ranks 0 and
    1, and on 2 and 3."""
    plan, _ = _split("tp=2,sp=2;tp=1", 5, tmp_path, INSIDE)
    assert not wired_problems(plan, {})

    def taken_from(numbers: range, one: int, other: int) -> dict[str, tuple[str, ...]]:
        changed: dict[str, tuple[str, ...]] = {}
        for mb in numbers:
            changed |= {f"4 1RF{mb}<0": (f"1RF{mb}<{one}",), f"4 1RF{mb}<2": (f"1RF{mb}<{other}",)}
            changed |= {f"{rank} 0SF{mb}>4": () for rank in {0, 2} - {one, other}}
            changed |= {f"{rank} 0F{mb}@1": (f"0F{mb}@1", f"0SF{mb}>4") for rank in {one, other} - {0, 2}}
        return changed

    every = range(m.MICROBATCHES, 2 * m.MICROBATCHES)
    assert not wired_problems(plan, taken_from(every, 1, 3))
    assert "are never sent to stage 1" in wired_problems(plan, taken_from(every[1:2], 1, 3))
    assert "brings nothing" in wired_problems(plan, taken_from(every, 0, 1))


def test_checker_refuses_parts_that_are_taken_for_whole(tmp_path: Path) -> None:
    """In place of what the ranks of the stage have gathered, each takes its own part twice."""
    plan, _ = _split("tp=2;sp=2", 4, tmp_path, INSIDE)
    graph = plan.module.graphs["s1.F"]
    at, gather = next((i, op) for i, op in enumerate(graph.ops) if op.kind == "all_gather")
    twice = make("concat", [gather.ins[0]] * 2, [gather.outs[0].name], axis=gather.attrs["axis"])
    assert twice.outs == gather.outs
    wrong = replace(graph, ops=(*graph.ops[:at], twice, *graph.ops[at + 1 :]))
    assert not list(check_local(plan.module))
    assert "may differ along sp" in "; ".join(map(str, check_local(plan.module.with_graph(wrong))))


@pytest.mark.parametrize("mesh", ["tp=2;sp=2", "tp=2;tp=1"])
def test_unlike_teams_are_simulated_and_evaluated(mesh: str, tmp_path: Path) -> None:
    plan, alone = _split(mesh, 4 if "sp" in mesh else 3, tmp_path, INSIDE)
    bundles = [ps.compile(p, tmp_path / name, backend="numpy") for name, p in (("apart", plan), ("alone", alone))]
    assert main(["simulate", str(bundles[0])]) == 0
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, m.VOCABULARY, (5, m.POSITIONS + 1))
    inputs = [value.name for value in plan.module.data_inputs]
    np.savez(tmp_path / "held.npz", **{inputs[0]: tokens[:, :-1], inputs[1]: tokens[:, 1:]})
    losses = []
    for bundle in bundles:
        with ps.open(bundle, timeout=60, eval_data=tmp_path / "held.npz") as job:
            losses.append(job.evaluate().loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_checker_refuses_messages_left_out_and_sent_twice() -> None:
    joins, splits = (_plan(mesh, "gpipe") for mesh in MESHES)
    assert not wired_problems(joins, {})
    assert not wired_problems(splits, {})
    sent, both = ("0SF4>2",), ("1SB4>0", "1SB4>0")
    assert "never sends this message" in wired_problems(joins, {"0 0SF4>2": ()})
    assert "never receives this message" in wired_problems(joins, {"1 0F4@1": ("0F4@1", *sent)})
    taken = {"1 0F4@1": ("0F4@1", *sent), "2 1RF4<0": ("1RF4<0", "1RF4<1")}
    assert "has already come from rank 0" in wired_problems(joins, taken)
    assert "never sends this message" in wired_problems(splits, {"0 0SF4>2": ()})
    assert "was already done" in wired_problems(joins, {"2 1SB4>0": both})


@pytest.mark.parametrize(
    ("mesh", "settings", "words"),
    [
        ("tp=1;tp=1;tp=1", {}, "'tp=1;tp=1;tp=1' are those of 3 stages, 2 are asked for"),
        ("dp=2;dp=1", {"shard": ()}, "axis dp has sizes 1 and 2"),
        ("tp=2;tp=1", {"zero": 1}, "--zero shares variables out among replicas, and there are none"),
        ("tp=2;tp=1", {"packs": 2}, "1 split point is named, 2 meshes of 2 stages each need 3"),
    ],
)
def test_what_cannot_be_done_is_refused(mesh: str, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ps.PenstockError) as caught:
        _plan(mesh, **settings)
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------- packs, parts, fewer ranks


@pytest.mark.parametrize(
    ("schedule", "mesh", "devices", "settings"),
    [("interleaved", "tp=2;tp=3", 5, {}), ("zb-v", "dp=2,tp=2;dp=2", 6, {"zero": 2})],
)
def test_packs_on_unlike_meshes_exchange_tiles(
    schedule: str, mesh: str, devices: int, settings: dict[str, object], tmp_path: Path
) -> None:
    """Two stages on each rank, cut where layers are split. Under zb-v stages 1 and 2 are on the same ranks."""
    cuts = tuple(f"h.{layer}.mlp.fc" for layer in (0, 1, 2))
    plan, alone = _split(mesh, devices, tmp_path, cuts, layers=4, schedule=schedule, packs=2, **settings)
    tiles = {(edge.src, edge.dst) for edge in plan.module.edges if travels_in_tiles(edge)}
    assert {(0, 1), (1, 0), (2, 3), (3, 2)} <= tiles
    assert ((1, 2) in tiles) == (schedule == "interleaved")
    assert trained(plan) == pytest.approx(trained(alone), rel=1e-6)
    assert main(["verify", str(ps.compile(plan, tmp_path / "b", backend="numpy")), "--steps", "1"]) == 0


@pytest.mark.parametrize("what", ["clip", "tied"])
def test_parts_of_unlike_stages_have_what_these_exchange(what: str, tmp_path: Path) -> None:
    """The norm of the gradient, and gradients of a parameter that both stages read, at level 3."""
    model = m.model() if what == "clip" else _tied(tmp_path)
    training = replace(m.TRAINING, clip=0.05) if what == "clip" else m.TRAINING
    settings = {"split_at": CUT, "shard": MEGATRON, "mesh": "dp=2,tp=2;dp=2", "stages": 2, "zero": 3}
    plan = ps.plan(model, ps.Cluster.local(6), training, schedule="1f1b", **settings)
    alone = ps.plan(model, ps.Cluster.local(1), training, schedule="1f1b", stages=1)
    assert trained(plan) == pytest.approx(trained(alone), rel=1e-6)


# The devices that are left of a plan, what is said of the plan for them, and the axes of its meshes.
LEFT = {
    "tp=2;tp=1": [
        ((0, 1), "1 stage on cpu:0+cpu:1, ", "one mesh for all stages", ["tp=2"]),
        ((2,), "1 stage on cpu:2, ", "one mesh for all stages", []),
    ],
    "dp=2,tp=2;dp=2": [
        ((0, 1, 4), "2 stages on cpu:0+cpu:1 cpu:4, ", "4 microbatches", ["dp=1,tp=2"]),
        ((0, 1, 2, 4), "2 stages on cpu:0+cpu:1 cpu:2+cpu:4, ", "one mesh for all stages", ["tp=2", "tp=2"]),
    ],
}


@pytest.mark.parametrize("packs", [1, 2])
@pytest.mark.parametrize("mesh", LEFT)
def test_a_run_on_unlike_meshes_goes_on_with_fewer_ranks(mesh: str, packs: int, tmp_path: Path) -> None:
    cuts = CUT if packs == 1 else tuple(f"h.{layer}.mlp.residual" for layer in (0, 1, 2))
    schedule = "1f1b" if packs == 1 else "interleaved"
    settings = {"split_at": cuts, "packs": packs, "zero": int("dp" in mesh)}
    cluster = ps.Cluster.local(6 if "dp" in mesh else 3)
    plan = ps.plan(m.model(), cluster, m.TRAINING, schedule=schedule, stages=2, mesh=mesh, shard=MEGATRON, **settings)
    bundle, feed, half = ps.compile(plan, tmp_path / "b", backend="numpy"), m.batches(plan.module, m.FEW), m.FEW // 2
    with ps.open(bundle, timeout=60) as job:
        begun = list(job.run(iter(feed[:half])))
        job.save(tmp_path / "checkpoint")
    for number, (left, words, note, axes) in enumerate(LEFT[mesh]):
        out, names = tmp_path / f"out{number}", [f"cpu:{i}" for i in left]
        said = replan(open_bundle(bundle), names, out)
        after = open_bundle(out)
        assert note in said
        assert [rank.device for rank in after.manifest.ranks] == names
        if packs == 1:
            assert words in said
            assert [",".join(f"{a}={n}" for a, n in mesh.axes) for mesh in after.module.meshes] == axes
        with ps.open(out, timeout=60, resume=tmp_path / "checkpoint") as job:
            ended = list(job.run(iter(feed[half:])))
        assert begun + ended == pytest.approx(m.on_one_device(schedule)[: m.FEW], rel=1e-6)
    # The control: from the beginning these are other losses.
    with ps.open(out, timeout=60) as job:
        assert list(job.run(iter(feed[half:]))) != pytest.approx(ended, rel=1e-3)
