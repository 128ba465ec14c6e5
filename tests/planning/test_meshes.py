"""Tests of plans whose tensors are split: the line that describes the mesh, by a count of its own, and what is refused."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.cluster.cluster import Device
from penstock.models import write_cnn, write_mlp
from penstock.planning.explain import argument

WORDS = "--dim batch=4 --microbatches 2 --loss mse --optimizer sgd --lr 0.1"
TP, HIDDEN = 2, 512


@pytest.fixture
def mlp(tmp_path):
    write_mlp(tmp_path / "mlp.onnx", [16, HIDDEN, 8])
    return str(tmp_path / "mlp.onnx")


def mesh_lines(capsys, *words):
    assert main(["plan", *words]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("mesh ")]


def test_a_line_says_how_tensors_are_split(mlp, capsys):
    # Columns of the first product with their bias, rows of the second; its bias is whole. Gradients lie alike.
    part, whole = (4 * (16 * n + n + n * 8 + 8) for n in (HIDDEN // TP, HIDDEN))
    (line,) = mesh_lines(capsys, mlp, "--devices", "2", "--mesh", "tp=2", "--shard", "preset:megatron", *WORDS.split())
    # Beside 4 parameters and 4 gradients there are the rate, its curve and the step. One sum adds the second product up.
    assert line == (
        f"mesh tp=2: 6 of 11 variables split, at most {part / 1024:.1f} KiB of {whole / 1024:.1f} KiB of parameters "
        "per device, 1 collective per microbatch"
    )


def test_the_line_counts_inputs_that_are_split(tmp_path, capsys):
    write_cnn(tmp_path / "cnn.onnx", size=8)
    words = ["--devices", "2", "--mesh", "tp=2", "--shard", "preset:spatial", *WORDS.split()]
    (line,) = mesh_lines(capsys, str(tmp_path / "cnn.onnx"), *words)
    # The weight of the last product and its gradient lie as the images do. There are 10 parameters with gradients.
    assert " 2 of 23 variables and 1 of 2 inputs split, " in line


def test_without_a_mesh_there_is_no_line(mlp, capsys):
    assert mesh_lines(capsys, mlp, "--devices", "2", *WORDS.split()) == []


@pytest.mark.parametrize("command", ["plan", "compile"])
@pytest.mark.parametrize(
    ("devices", "mesh", "told"),
    [
        ("3", "tp=2", ["idle: cpu:2; tp=2 for 1 stage takes 2 of 3 devices"]),
        ("5", "dp=2,tp=2", ["idle: cpu:4; dp=2,tp=2 for 1 stage takes 4 of 5 devices"]),
        ("2", "tp=2", []),
    ],
)
def test_devices_that_no_mesh_takes_are_told_in_a_line(command, devices, mesh, told, mlp, tmp_path, capsys):
    more = ["--backend", "numpy", "-o", str(tmp_path / "bundle")] if command == "compile" else []
    assert main([command, mlp, "--devices", devices, "--mesh", mesh, *WORDS.split(), *more]) == 0
    said = capsys.readouterr()
    assert [line for line in (said.out + said.err).splitlines() if line.startswith("idle: ")] == told


def test_layouts_without_a_mesh_are_refused(mlp, capsys):
    assert main(["plan", mlp, "--devices", "2", "--shard", "preset:megatron", *WORDS.split()]) == 2
    assert "layouts are given, but no mesh" in capsys.readouterr().err


FACTS = [
    # An axis that the mesh does not have, a dimension smaller than the axis, a name that is none, all in one error.
    (
        "--mesh tp=16 --devices 16 --shard fc1.weight=[/rows,_] --shard y.weight=[_,/tp] --shard fc7.*=[_]",
        [
            "'fc1.weight=[/rows,_]': @fc1.weight: there is no axis rows, the mesh has tp",
            "'y.weight=[_,/tp]': @y.weight: dimension 1 has 8 elements for 16 devices",
            "'fc7.*=[_]' fits no name; there are fc1.weight, fc1.bias, y.weight, y.bias, x",
        ],
    ),
    # Layouts in conflict: of one tensor, in one tensor, with its shape, with what dp is for.
    (
        "--mesh dp=2,tp=2 --devices 4 --shard fc1.weight=[_,/tp] --shard fc1.weight=[/tp,_] --shard y.weight=[/tp,/tp] "
        "--shard y.bias=[_,/tp] --shard x=[/dp,_]",
        [
            "'fc1.weight=[_,/tp]' and 'fc1.weight=[/tp,_]' are two layouts of the same tensors",
            "'y.weight=[/tp,/tp]': @y.weight: axis tp splits two dimensions",
            "'y.bias=[_,/tp]': @y.bias: f32[8] has 1 dimension, the layout 2",
            "'x=[/dp,_]': %x: microbatches are dealt out along dp, which splits no tensor",
        ],
    ),
    # Devices that cannot be one team.
    (
        "--mesh tp=2 --devices cpu,sm_90,sm_90,cpu --shard preset:megatron",
        ["stage 0 has cpu:0 of cpu native and cuda:0 of cuda sm_90", "stage 1 has cuda:1 of cuda sm_90 and cpu:1 of"],
    ),
    ("--mesh tp=4 --devices 3 --shard preset:megatron", ["1 stage of 4 devices each need 4, the cluster has 3"]),
    ("--mesh tp=2,tp=2 --devices 4 --shard preset:megatron", ["cannot read the mesh 'tp=2,tp=2' at 'tp=2'"]),
    ("--mesh a=2,b=2 --devices 4 --shard preset:megatron", ["needs one axis beside dp, the mesh has a, b"]),
    ("--mesh tp=2 --devices 4 --replicas 2", ["--replicas and --mesh both say how many devices a stage has"]),
]


@pytest.mark.parametrize(("flags", "facts"), FACTS, ids=range(len(FACTS)))
def test_mistakes_name_both_facts_before_anything_is_compiled(mlp, tmp_path, capsys, flags, facts):
    words = ["compile", mlp, "-o", str(tmp_path / "bundle"), *WORDS.split(), *flags.split()]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("error: ") == 1
    for fact in facts:
        assert fact in said
    assert not (tmp_path / "bundle").exists()


def test_control_of_mistakes_what_is_right_is_compiled(mlp, tmp_path):
    flags = (
        "--backend numpy --mesh dp=2,tp=2 --devices 4 --stages 1 --shard fc1.weight=[_,/tp] --shard fc*.weight=[/tp,_]"
    )
    words = ["compile", mlp, "-o", str(tmp_path / "bundle"), *WORDS.split(), *flags.split()]
    assert main(words) == 0


def _two(memory: int) -> ps.Cluster:
    return ps.Cluster(tuple(Device(f"cpu:{i}", spaces=(("ram", memory),)) for i in range(2)))


def test_the_planner_shares_optimiser_state_out(tmp_path):
    """In memory for less than whole replicas, replicas train with level 1. The control: without it a slower pipeline does."""
    model = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [128] * 9, batch=64))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=2)

    def peak(plan: ps.Plan) -> int:
        return max(row["peak"] for row in plan.as_dict()["memory"].values())

    whole, shared = (
        peak(ps.plan(model, _two(1 << 40), training, replicas=2, stages=1, zero=level)) for level in (0, 1)
    )
    assert shared < 0.95 * whole
    tight = _two((whole + shared) // 2)

    def searched(level: int) -> ps.Plan:
        return ps.plan_best(lambda size: model, tight, training, batch=128, schedules=("1f1b",), zero=level)

    plan = searched(1)
    assert plan.search.plan.zero == plan.as_dict()["zero"] == 1
    assert [stage["devices"] for stage in plan.as_dict()["stages"]] == [["cpu:0", "cpu:1"]]
    assert peak(plan) == shared
    # The control, and what it says would be faster.
    other = searched(0)
    assert "zero" not in other.as_dict()
    argued = other.as_dict()["planner"]
    assert argued["what_if"]["level 1 of zero (--zero 1)"] < 0.9 * argued["bound_s"]
    assert any("level 1 of zero (--zero 1)" in line for line in argument(other.search))


def test_stages_with_unlike_numbers_of_replicas_share_their_own_out(tmp_path):
    model = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [16] * 6, batch=4))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=2)
    plan = ps.plan(
        model, ps.Cluster.local(3), training, devices=[["cpu:0", "cpu:1"], ["cpu:2"]], split_at=["fc3.product"], zero=1
    )
    parts = {var.stage: str(var.type) for var in plan.module.vars.values() if var.name.endswith("weight.adam_m")}
    assert parts == {0: "f32[16/dp,16]", 1: "f32[16,16]"}
    facts = plan.as_dict()
    assert ("mesh" in facts, facts["zero"]) == (False, 1)


@pytest.mark.parametrize(("level", "code"), [("1", 0), ("2", 2)])
def test_the_planner_knows_one_level(mlp, capsys, level, code):
    words = ["plan", mlp, "--devices", "2", "--batch", "8", "--loss", "mse", "--optimizer", "adamw", "--zero", level]
    assert main(words) == code
    assert ("take level 1, or leave --batch out" in capsys.readouterr().err) == (level == "2")


@pytest.mark.parametrize(
    ("devices", "have"),
    [
        ((("cpu:0", "cpu:1"), ("cpu:2",)), "stage 1 has 1 device"),
        ((("cpu:0",), ("cpu:1", "cpu:2")), "stage 0 has 1 device"),
        ((("cpu:0", "cpu:1"), ("cpu:2", "cpu:3", "cpu:4")), "stage 1 has 3 devices"),
    ],
    ids=["fewer behind", "fewer before", "more"],
)
def test_devices_that_do_not_fit_the_mesh_are_refused_by_stage(mlp, devices, have):
    model = ps.from_onnx(mlp, dims={"batch": 4})
    training = ps.Training("mse", ps.SGD(lr=0.1), 2)
    with pytest.raises(ps.PenstockError) as caught:
        ps.plan(model, ps.Cluster.local(5), training, mesh="tp=2", devices=devices)
    assert caught.value.exit_code == 2
    assert caught.value.what.splitlines()[1:] == [f"  - {have}, its mesh 2 needs 2"]


def test_control_devices_that_fit_the_mesh_are_taken(mlp):
    model = ps.from_onnx(mlp, dims={"batch": 4})
    training = ps.Training("mse", ps.SGD(lr=0.1), 2)
    plan = ps.plan(model, ps.Cluster.local(4), training, mesh="tp=2", devices=(("cpu:3", "cpu:1"), ("cpu:2", "cpu:0")))
    assert [plan.module.devices_of(s.index) for s in plan.module.stages] == [("cpu:3", "cpu:1"), ("cpu:2", "cpu:0")]
