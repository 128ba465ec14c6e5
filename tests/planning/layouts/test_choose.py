"""Layouts chosen by price: beside presets, beside every layout of the parameters, and trained as on one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from planning.beside_one_device import assert_trains_as_one_device

import penstock as ps
from penstock.commands import parser as cli
from penstock.ir.cluster.cluster import OTHER_HOST, SAME_HOST, Cluster, Device, LinkClass
from penstock.ir.ops import EXCHANGES
from penstock.ir.text import print_module
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.passes.sharding.presets import PRESETS
from penstock.planning.layouts.choose import CHOSEN, IN_BLOCKS, layout_model
from penstock.planning.layouts.search import NODES, best_options
from penstock.planning.offloading.choose import needs_of
from penstock.planning.options import PlanOptions
from penstock.support.errors import DoesNotFit, UsageError

TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=2)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "cnn": lambda path: write_cnn(path, 16, size=24),
    "gpt": lambda path: write_gpt(path, layers=2, width=64, heads=4, vocab=256, positions=16, batch=8),
    "mlp": lambda path: write_mlp(path, [64, 256, 64, 256, 64], 16),
}
FAST, SLOW, SLOWEST = (1.25e9, 1e-6), (1.25e7, 1e-4), (1e6, 1e-3)


def hosts(count: int, bandwidth: float, latency: float, memory: int | None = None) -> Cluster:
    spaces = () if memory is None else (("ram", memory),)
    return Cluster(
        tuple(Device(f"cpu:{i}", host=f"h{i}", spaces=spaces) for i in range(count)),
        classes=(LinkClass(OTHER_HOST, bandwidth, latency),),
    )


def note(plan: ps.Plan) -> str:
    (text,) = [note.text for note in plan.module.notes if note.text.startswith("layouts chosen")]
    return text


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("cnn", "tp=2"),
        ("mlp", "dp=2,tp=2"),
        ("gpt", "tp=2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("cnn", "dp=2,tp=2"), ("mlp", "tp=2"), ("gpt", "dp=2,tp=2"))
        ),
    ],
)
def test_no_preset_is_faster(name: str, mesh: str, tmp_path: Path) -> None:
    model = ps.from_onnx(WRITERS[name](tmp_path / "model.onnx"))
    for link in (FAST, SLOW):
        cluster = hosts(4 if "," in mesh else 2, *link)

        def step(*shard: str, cluster: Cluster = cluster) -> float:
            return ps.plan(model, cluster, TRAINING, mesh=mesh, shard=shard).predicted.step

        chosen = ps.plan(model, cluster, TRAINING, mesh=mesh, shard="auto")
        others = {"none": step("none")}
        for preset in PRESETS:
            try:
                others[preset] = step(f"preset:{preset}")
            except UsageError:
                assert f"preset:{preset} " not in note(chosen)
        assert len(others) > 1
        assert chosen.predicted.step <= min(others.values())
        # Control: which layouts they are matters.
        assert max(others.values()) > 1.05 * chosen.predicted.step


def test_the_programme_finds_what_no_preset_has(tmp_path: Path) -> None:
    """Four heads on eight devices: pairs of products in attention cannot be split by heads."""
    model = ps.from_onnx(WRITERS["gpt"](tmp_path / "model.onnx"))
    text = note(ps.plan(model, hosts(8, *FAST), TRAINING, mesh="tp=8", shard="auto"))
    assert text.startswith(f"layouts chosen by simulation: {CHOSEN}, ")


def one_host(count: int) -> Cluster:
    devices = tuple(Device(f"cpu:{i}", flops=5e10, bandwidth=1e10) for i in range(count))
    return Cluster(devices, classes=(LinkClass(SAME_HOST, 7e9, 2e-5),))


def test_what_is_outside_of_blocks_may_stay_open(tmp_path: Path) -> None:
    """A split embedding gives its layout to the gradients of all layers, which the programme does not know."""
    path = write_gpt(tmp_path / "model.onnx", layers=4, width=64, heads=4, vocab=128, positions=32, batch=2)
    model, training = ps.from_onnx(path), ps.Training(loss="cross_entropy")
    choices = layout_model(model, one_host(4), training, PlanOptions(mesh="a=2,b=2", shard=("auto",)))
    options = best_options(choices.costs()).options
    assert options is not None

    def plan(*shard: str) -> ps.Plan:
        return ps.plan(model, one_host(4), training, mesh="a=2,b=2", shard=shard)

    chosen, none = plan("auto"), plan("none")
    assert f": {CHOSEN}{IN_BLOCKS}, " in note(chosen)
    assert chosen.predicted.step < 0.65 * none.predicted.step
    blocks = choices.texts(options, open_outside=True)
    assert any("@h.3." in text for text in blocks)
    assert not any("wte" in text or "wpe" in text for text in blocks)
    # Control: with all layouts of the programme, the model takes much longer.
    assert set(choices.texts(options)) - set(blocks)
    assert plan(*choices.texts(options)).predicted.step > 1.3 * chosen.predicted.step


@pytest.mark.parametrize("link", [FAST, pytest.param((1.25e8, 1e-5), marks=pytest.mark.slow)])
def test_no_layout_of_the_parameters_is_faster(link: tuple[float, float], tmp_path: Path) -> None:
    """All layouts of three weights, with the values between them whole or split: the programs of brute force."""
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [64, 512, 64, 256], 32))
    cluster = hosts(2, *link)
    weights = [name for name, var in model.module.vars.items() if var.type.rank == 2]
    assert len(weights) == 3
    steps = {}
    for layouts in product(("[_,_]", "[_,/tp]", "[/tp,_]"), repeat=3):
        for samples in ("[_,_]", "[/tp,_]"):
            shard = [f"@{name}={layout}" for name, layout in zip(weights, layouts, strict=True)] + [f"%x={samples}"]
            steps[*layouts, samples] = ps.plan(model, cluster, TRAINING, mesh="tp=2", shard=shard).predicted.step
    chosen = ps.plan(model, cluster, TRAINING, mesh="tp=2", shard="auto").predicted.step
    assert chosen <= 1.02 * min(steps.values())
    # Control: most layouts are slower than that.
    assert np.median([*steps.values()]) > 1.05 * chosen


def test_equal_layers_may_alternate(tmp_path: Path) -> None:
    """A product split by columns and one split by rows in turn: one sum for two layers."""
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [256] * 9, 64))
    weights = [name for name, var in model.module.vars.items() if var.type.rank == 2]
    assert len(weights) == 8

    def step(*shard: str) -> float:
        return ps.plan(model, one_host(4), ps.Training(loss="mse"), mesh="a=2,b=2", shard=shard).predicted.step

    def laid(*layouts: str) -> list[str]:
        each = zip(weights, layouts * (8 // len(layouts)), strict=True)
        return [f"@{name}={layout}" for name, layout in each]

    by_hand = {layouts: step(*laid(*layouts)) for layouts in product(("[_,_]", "[_,/a/b]", "[/a/b,_]"), repeat=2)}
    assert step("auto") <= min(by_hand.values())
    # Control: alternating pays, beside all layers alike.
    assert min(by_hand.values()) < 0.95 * min(seconds for (one, other), seconds in by_hand.items() if one == other)


def test_of_three_axes_two_are_taken(tmp_path: Path) -> None:
    model = ps.from_onnx(WRITERS["mlp"](tmp_path / "model.onnx"))
    plan = ps.plan(model, hosts(8, *FAST), TRAINING, mesh="a=2,b=1,c=2,d=2", shard="auto")
    assert plan.predicted.step < ps.plan(model, hosts(8, *FAST), TRAINING, mesh="a=2,b=1,c=2,d=2").predicted.step
    assert {axis for text in plan.as_dict()["shard"] for axis in "abcd" if f"/{axis}" in text} == {"a", "c"}


def exchanges(plan: ps.Plan) -> int:
    return sum(op.kind in EXCHANGES for graph in plan.module.graphs.values() for op in graph.ops)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("cnn", "a=2,b=2"),
        ("gpt", "tp=2"),
        pytest.param("cnn", "tp=2", marks=pytest.mark.slow),
        pytest.param("gpt", "a=2,b=2", marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_device(name: str, mesh: str, tmp_path: Path) -> None:
    model = ps.from_onnx(WRITERS[name](tmp_path / "model.onnx"))
    plan = ps.plan(model, hosts(4 if "," in mesh else 2, *FAST), TRAINING, mesh=mesh, shard="auto")
    assert exchanges(plan)
    assert_trains_as_one_device(plan, model, TRAINING)


def test_none_is_a_plan_without_layouts(tmp_path: Path) -> None:
    model = ps.from_onnx(WRITERS["gpt"](tmp_path / "model.onnx"))

    def text(**asked: object) -> str:
        return print_module(ps.plan(model, Cluster.local(2), TRAINING, **asked).module)

    assert text(shard="none") == text()
    assert text(mesh="tp=2", shard="none") == text(mesh="tp=2")
    # Control: layouts make another program.
    assert text(mesh="tp=2", shard="preset:batch") != text(mesh="tp=2")


def test_memory_asks_for_split_weights(tmp_path: Path) -> None:
    """Links are so slow that nothing split pays, and whole weights do not fit."""
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [512, 2048, 2048, 512], 8))
    ample = ps.plan(model, hosts(2, *SLOWEST), TRAINING, mesh="tp=2", shard="auto")
    assert not exchanges(ample)
    limited = hosts(2, *SLOWEST, memory=round(0.8 * max(needs_of(ample.module).values())))
    with pytest.raises(DoesNotFit):
        ps.plan(model, limited, TRAINING, mesh="tp=2", shard="none")
    tight = ps.plan(model, limited, TRAINING, mesh="tp=2", shard="auto")
    assert exchanges(tight)
    assert "into memory do not fit: none" in note(tight)


def test_where_nothing_fits_the_error_names_what_was_tried(tmp_path: Path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [512, 2048, 2048, 512], 8))
    cluster, errors = hosts(2, *SLOWEST, memory=10_000_000), {}
    for shard in ("none", "auto"):
        with pytest.raises(DoesNotFit) as raised:
            ps.plan(model, cluster, TRAINING, mesh="tp=2", shard=shard)
        errors[shard] = str(raised.value).splitlines()
    # Beside the error of no layouts there is one line, in front of the hint.
    *same, hint = errors["none"]
    assert [*errors["auto"][: len(same)], errors["auto"][-1]] == [*same, hint]
    (tried,) = errors["auto"][len(same) : -1]
    assert "--shard auto tried other layouts, too; into memory do not fit: none, preset:" in tried
    assert f", {CHOSEN}" in tried


def test_the_programme_says_how_far_it_is(tmp_path: Path) -> None:
    model = ps.from_onnx(WRITERS["mlp"](tmp_path / "model.onnx"))
    told: list[tuple[int, int, str]] = []

    def tell(done: int, total: int, what: str) -> None:
        told.append((done, total, what))

    ps.plan(model, hosts(2, *FAST), TRAINING, mesh="tp=2", shard="auto", progress=tell)
    assert f"costs of layouts (--shard auto: {CHOSEN})" in {what for _, _, what in told}
    solves = [one for one in told if one[2] == f"nodes of the search tree (--shard auto: {CHOSEN})"]
    assert solves
    assert all(0 <= done < total == NODES for done, total, _ in solves)


def test_a_plan_file_has_the_layouts(tmp_path: Path) -> None:
    path = WRITERS["gpt"](tmp_path / "model.onnx")
    plan = ps.plan(ps.from_onnx(path), Cluster.local(2), TRAINING, mesh="tp=2", shard="auto")
    facts = plan.as_dict()
    assert "auto" not in facts["shard"]
    (tmp_path / "plan.json").write_text(json.dumps(facts))
    words = ["plan", str(path), "--devices", "2", "--loss", "cross_entropy", "--plan", str(tmp_path / "plan.json")]
    assert cli.main([*words, "--json"]) == 0


def test_inference_has_layouts_too(tmp_path: Path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [512, 2048, 512], 64))
    plan = ps.plan(model, hosts(2, *FAST), mesh="tp=2", shard="auto")
    assert plan.predicted.step < ps.plan(model, hosts(2, *FAST), mesh="tp=2").predicted.step


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [8, 8, 8], 4))

    def refused(**asked: object) -> str:
        with pytest.raises(UsageError) as error:
            ps.plan(model, Cluster.local(4), TRAINING, **asked)
        return str(error.value)

    assert "and there is none" in refused(shard="auto")
    assert "needs an axis beside dp" in refused(mesh="dp=2", shard="auto")
    assert "one mesh for all stages" in refused(mesh="tp=2;tp=1", shard="auto")
    assert "leave out preset:batch" in refused(mesh="tp=2", shard=["auto", "preset:batch"])
    assert "leave out none" in refused(mesh="tp=2", shard=["none", "auto"])
    assert "both choose by price" in refused(mesh="tp=2", shard="auto", offload="auto")
