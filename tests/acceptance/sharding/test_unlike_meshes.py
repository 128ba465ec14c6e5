"""Stages with a mesh each: a team of two ranks sends whole values to one rank, and one rank to a team of two.

Ranks are processes with the NumPy back end. The oracle is a training of the same schedule on one device. What the
checker refuses are the same plans with a message left out, or with one too many.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from acceptance.sharding import matrix as m

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.commands.parser import main
from penstock.ir.schedule import Action
from penstock.ir.verify.messages import check_wired
from penstock.models import write_gpt
from penstock.passes.sharding.given import mesh_text

CUT = ("h.1.mlp.residual",)
MESHES = ("tp=2;tp=1", "tp=1;tp=2")


def _plan(mesh: str, schedule: str = "1f1b", **settings: object) -> ps.Plan:
    given = {"split_at": CUT, "shard": ("preset:megatron",), **settings}
    return ps.plan(m.model(), ps.Cluster.local(3), m.TRAINING, schedule=schedule, stages=2, mesh=mesh, **given)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw"])
@pytest.mark.parametrize("mesh", MESHES)
def test_training_is_that_of_one_device(mesh: str, schedule: str) -> None:
    assert m.trained(_plan(mesh, schedule)) == pytest.approx(m.on_one_device(schedule), rel=1e-6)


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
    assert m.trained(plan) == pytest.approx(m.trained(alone), rel=1e-6)


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


def _problems(plan: ps.Plan, changed: dict[str, tuple[str, ...]]) -> str:
    """Return what the checker of messages says where actions are replaced by others, by rank and action."""
    module = plan.module
    assert module.schedule is not None

    def rule(rank: int, action: Action) -> list[Action]:
        return [Action.parse(text) for text in changed.get(f"{rank} {action}", (str(action),))]

    return "; ".join(map(str, check_wired(module.but(schedule=module.schedule.rewrite_ranks(rule)))))


def test_checker_refuses_messages_left_out_and_sent_twice() -> None:
    joins, splits = (_plan(mesh, "gpipe") for mesh in MESHES)
    assert not _problems(joins, {})
    assert not _problems(splits, {})
    sent, both = ("0SF4>2",), ("1SB4>0", "1SB4>0")
    assert "never sends this message" in _problems(joins, {"0 0SF4>2": ()})
    assert "never receives this message" in _problems(joins, {"1 0F4@1": ("0F4@1", *sent)})
    taken = {"1 0F4@1": ("0F4@1", *sent), "2 1RF4<0": ("1RF4<0", "1RF4<1")}
    assert "has already come from rank 0" in _problems(joins, taken)
    assert "never sends this message" in _problems(splits, {"0 0SF4>2": ()})
    assert "was already done" in _problems(joins, {"2 1SB4>0": both})


@pytest.mark.parametrize(
    ("mesh", "settings", "words"),
    [
        ("tp=2;tp=1", {"split_at": ()}, "0 split points are named, 2 meshes need 1"),
        ("dp=2;dp=1", {"shard": ()}, "axis dp has sizes 1 and 2"),
        ("tp=2;tp=3", {}, "axis tp has sizes 2 and 3"),
        ("tp=2;tp=1", {"zero": 1}, "--zero shares variables out on one mesh of all stages"),
        ("tp=2;tp=1", {"split_at": ("h.1.mlp.fc",)}, "what travels between stages with unlike meshes is whole"),
    ],
)
def test_what_cannot_be_done_is_refused(mesh: str, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ps.PenstockError) as caught:
        _plan(mesh, **settings)
    assert words in str(caught.value)
