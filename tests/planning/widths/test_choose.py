"""Layouts of widths: by simulation beside one width for all, and trained as on one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.commands import parser as cli
from penstock.ir.cluster.cluster import OTHER_HOST, Cluster, Device, LinkClass
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.ops import OPS
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.planning.model import Model
from penstock.planning.predict import predict
from penstock.support.errors import UsageError

MESH, AXES = "a=2,b=2,c=2", "abc"
TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=2)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "cnn": lambda path: write_cnn(path, 16, size=24),
    "gpt": lambda path: write_gpt(path, layers=1, width=64, heads=2, vocab=256, positions=16, batch=8),
}


def hosts(count: int, bandwidth: float, latency: float) -> Cluster:
    return Cluster(
        tuple(Device(f"cpu:{i}", host=f"h{i}") for i in range(count)),
        classes=(LinkClass(OTHER_HOST, bandwidth, latency),),
    )


def uniform(model: Model, count: int) -> list[str]:
    """Layouts of all samples over the first axes."""
    split = "".join(f"/{axis}" for axis in AXES[:count]) or "_"
    inputs = model.module.data_inputs
    texts = [f"{value.name}=[{','.join([split, *['_'] * (value.type.rank - 1)])}]" for value in inputs]
    return [*texts, f"labels=[{split}{',_' * (model.module.graphs['main'].outs[0].type.rank - 2)}]"]


def notes(plan: ps.Plan) -> list[str]:
    return [note.text for note in plan.module.notes if note.origin == "placement"]


@pytest.mark.parametrize("name", WRITERS)
def test_widths_are_no_slower_than_one_width_for_all(name: str, tmp_path: Path) -> None:
    model = ps.from_onnx(WRITERS[name](tmp_path / "model.onnx"))
    spread = []
    for bandwidth, latency in ((1.25e9, 1e-5), (1.25e8, 1e-4)):
        cluster = hosts(8, bandwidth, latency)

        def step(shard: list[str], cluster: Cluster = cluster) -> float:
            return predict(ps.plan(model, cluster, TRAINING, mesh=MESH, shard=shard).module).step

        each = [step(uniform(model, count)) for count in range(4)]
        assert step(["widths"]) <= 1.02 * min(each)
        # With a limit of 1 nothing that several devices compute pays for its sums.
        assert step(["widths:1"]) == pytest.approx(each[0], rel=0.02)
        spread.append(max(each) / min(each))
    # Control: which width it is matters.
    assert min(spread) > 1.5


def mixed(model: Model) -> ps.Plan:
    """A plan with several widths, over links for which these pay."""
    plan = ps.plan(model, hosts(8, 1.25e9, 1e-5), TRAINING, mesh=MESH, shard=["widths:3"])
    (note,) = notes(plan)
    assert " from " in note
    assert "none uses more than 3 times the device seconds of one device" in note
    assert note.endswith("layers on fewer devices are computed on the others as well")
    return plan


@pytest.mark.parametrize("name", WRITERS)
def test_training_is_that_of_one_device(name: str, tmp_path: Path) -> None:
    model = ps.from_onnx(WRITERS[name](tmp_path / "model.onnx"))
    plan, alone = mixed(model), ps.plan(model, Cluster.local(1), TRAINING)
    exchanges = {str(op.attrs["over"]) for op in plan.module.graphs["s0.B"].ops if OPS[op.kind].family == "collective"}
    assert len(exchanges) > 1
    draw = np.random.default_rng(0)

    def fed(value_type: object, name: str) -> np.ndarray:
        shape = (2 * value_type.dims[0], *value_type.dims[1:])
        return draw.integers(0, 10, shape) if value_type.dtype == "i64" else draw.standard_normal(shape)

    batches = [{v.name: fed(v.type, v.name) for v in alone.reference.data_inputs} for _ in range(2)]
    weights = model.imported.weights
    split, whole = (run_schedule(each.module, weights, batches).variables for each in (plan, alone))
    trained = [name for name in whole if name in weights]
    for each in trained:
        np.testing.assert_allclose(split[each], whole[each], rtol=1e-9, atol=1e-11, err_msg=each)
    assert max(np.abs(whole[each] - weights[each]).max() for each in trained) > 1e-3


def test_a_plan_file_has_the_layouts(tmp_path: Path) -> None:
    path = WRITERS["cnn"](tmp_path / "model.onnx")
    facts = mixed(ps.from_onnx(path)).as_dict()
    assert "widths" not in facts["pipeline"]
    assert any(text.startswith("%y.product=[_,_]") for text in facts["shard"])
    (tmp_path / "plan.json").write_text(json.dumps(facts))
    words = ["plan", str(path), "--devices", "8", "--loss", "cross_entropy", "--plan", str(tmp_path / "plan.json")]
    assert cli.main([*words, "--json"]) == 0


def test_what_has_no_widths_is_refused(tmp_path: Path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [8, 8, 8], 4))

    def refused(mesh: str, *shard: str, devices: int = 8) -> str:
        with pytest.raises(UsageError) as error:
            ps.plan(model, Cluster.local(devices), TRAINING, mesh=mesh, shard=shard)
        return str(error.value)

    assert "%x is f32[4,8], too few samples for 8 devices" in refused(MESH, "widths")
    assert "has no amplification limit of 1 or more" in refused("a=2", "widths:0.5")
    assert "has no amplification limit of 1 or more" in refused("a=2", "widths:many")
    assert "leave out fc1.weight=[_,/a]" in refused("a=2", "widths", "fc1.weight=[_,/a]")
    assert "needs an axis beside dp" in refused("dp=2", "widths")
    assert "over more than one device" in refused("a=1", "widths")
    assert "leave out widths:2" in refused("a=2", "widths", "widths:2")
    with pytest.raises(UsageError, match="stage 0 has 2 devices, its mesh 2 x 2 needs 4"):
        ps.plan(model, Cluster.local(4), TRAINING, mesh="a=2,b=2", shard=["widths"], devices=[["cpu:0", "cpu:1"]])


@pytest.mark.slow
def test_processes_train_as_one(tmp_path: Path) -> None:
    model = ps.from_onnx(write_cnn(tmp_path / "model.onnx", 4, size=12))
    draw = np.random.default_rng(0)
    feed = [
        {"x": draw.standard_normal((8, 1, 12, 12)).astype(np.float32), "labels": draw.integers(0, 10, 8)}
        for _ in range(4)
    ]

    def losses(name: str, cluster: Cluster, **asked: object) -> list[float]:
        plan = ps.plan(model, cluster, TRAINING, **asked)
        ps.compile(plan, tmp_path / name)
        with ps.open(tmp_path / name) as job:
            return list(job.run(iter(feed)))

    layouts = ps.plan(model, hosts(4, 1.25e9, 1e-5), TRAINING, mesh="a=2,b=2", shard=["widths:1.5"]).as_dict()["shard"]
    assert len({text.rpartition("=[")[2].partition(",")[0] for text in layouts}) > 1
    split = losses("split", Cluster.local(4), mesh="a=2,b=2", shard=layouts)
    np.testing.assert_allclose(split, losses("alone", Cluster.local(1)), rtol=1e-5)
