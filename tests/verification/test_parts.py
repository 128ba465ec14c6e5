"""`penstock verify` of bundles whose tensors are split: right ones pass, and of wrong ones the first value is named that
is off, with its operation, axis and rank."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.backends.tvm.compile import pool
from penstock.backends.tvm.kernels.tools import elements
from penstock.commands.parser import main
from penstock.ir.text import parse_module, print_module
from penstock.models import write_mlp, write_resnet
from penstock.planning.build import build
from penstock.planning.options import BuildOptions
from penstock.planning.plan import Plan
from penstock.verification.inputs import synthetic_batch
from penstock.verification.parts import PartOff, PartsComparison

MICROBATCHES = 4
# Mesh, schedule, stages: teams, uneven parts, delayed updates, replicas.
SETTINGS = {
    "tp=2": ("tp=2", "1f1b", 1),
    "tp=3, uneven": ("tp=3", "1f1b", 1),
    "two stages, delayed": ("tp=2", "2bw", 2),
    "dp=2, tp=2": ("dp=2,tp=2", "1f1b", 1),
    "W apart": ("tp=2", "zb-1f1b", 2),
}


def planned(folder: Path, mesh: str = "tp=2", schedule: str = "1f1b", stages: int = 1) -> Plan:
    path = folder / "model.onnx"
    write_mlp(path, [6, 8, 5, 4], 3)
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), MICROBATCHES, clip=1.0)
    sizes = [int(part.split("=")[1]) for part in mesh.split(",")]
    return ps.plan(
        ps.from_onnx(path),
        ps.Cluster.local(int(np.prod(sizes)) * stages),
        training,
        schedule=schedule,
        stages=stages,
        mesh=mesh,
        shard=["preset:megatron", "y.weight=[_,/tp]"],
    )


def changed(plan: Plan, before: str, after: str) -> Plan:
    """Return the plan with one place of its program's text changed."""
    text = print_module(plan.module)
    assert text.count(before) == 1, f"{before!r} is there {text.count(before)} times"
    return replace(plan, module=parse_module(text.replace(before, after), "changed.ir"))


def first_off(plan: Plan) -> tuple[PartOff | None, PartsComparison]:
    comparison = PartsComparison(plan.module, plan.reference)
    batch = synthetic_batch(plan.module, MICROBATCHES, 0)
    return comparison.first_off(plan.model.imported.weights, batch), comparison


@pytest.mark.parametrize("name", SETTINGS)
def test_every_value_of_a_right_program_is_that_of_one_device(tmp_path: Path, name: str) -> None:
    off, comparison = first_off(planned(tmp_path, *SETTINGS[name]))
    assert off is None
    # The values of every microbatch, and those of the update.
    assert comparison.compared > 30 * MICROBATCHES


def test_a_sum_that_is_wrong_is_named_with_its_axis_and_rank(tmp_path: Path) -> None:
    plan = changed(
        planned(tmp_path),
        "= all_reduce(%fc2.product.partial, over=tp",
        "= all_reduce(%fc2.product.partial, by=max, over=tp",
    )
    off, _ = first_off(plan)
    assert off is not None
    text = str(off)
    assert text.startswith("%fc2.product : f32[3,5] of microbatch 0 is off by ")
    assert "on rank 0 (tp 0), along tp, in @s0.F: %fc2.product" in text
    assert "\n" not in text


def test_the_rank_is_named_whose_part_is_wrong(tmp_path: Path) -> None:
    """Each rank adds its own number, which is zero on the first one."""
    plan = planned(tmp_path, "tp=3")
    line = next(x for x in print_module(plan.module).splitlines() if x.strip().startswith("%relu1 : "))
    t = line.split(" : ")[1].split(" = ")[0]
    instead = [
        line.replace("%relu1 :", "%before :"),
        "    %own : f32[] = cast(%mesh.tp, dtype=f32)",
        f"    %relu1 : {t} = add(%before, %own)",
    ]
    off, _ = first_off(changed(plan, line, "\n".join(instead)))
    assert off is not None
    assert (off.key[2], off.op.kind, off.rank, off.coordinates, off.axes) == ("relu1", "add", 1, {"tp": 1}, ("tp",))


def test_a_right_bundle_passes_and_a_wrong_one_names_the_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path)
    right = build(plan, tmp_path / "right", BuildOptions("numpy"))
    assert main(["verify", str(right), "--steps", "1"]) == 0
    assert "values of 2 ranks in float64 are those of the whole program" in capsys.readouterr().err
    wrong = changed(
        plan, "= all_reduce(%fc2.product.partial, over=tp", "= all_reduce(%fc2.product.partial, by=max, over=tp"
    )
    path = build(wrong, tmp_path / "wrong", BuildOptions("numpy"))
    assert main(["verify", str(path)]) == 5
    told = capsys.readouterr().err
    assert "%fc2.product : f32[3,5] of microbatch 0 is off by" in told
    assert "Traceback" not in told
    assert main(["verify", "--bisect", "--repro", "none", "--steps", "1", str(path)]) == 5
    said = capsys.readouterr().out
    assert "first wrong after: the program of the bundle" in said
    assert "%fc2.product : f32[3,5] of microbatch 0 is off by" in said


def test_a_wrong_kernel_of_split_tensors_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is right, its compiled code is not: it leaves out a relu. Collectives between kernels are played."""
    words = ["verify", "--bisect", "--repro", "none", "--steps", "1"]
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)
    right = build(planned(tmp_path), tmp_path / "right", BuildOptions("tvm"))
    assert main([*words, str(right)]) == 0
    assert "graphs of 1 stage compiled by tvm" in capsys.readouterr().out
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))
    monkeypatch.setitem(elements.POINTWISE, "relu", lambda f, a, x: x)
    wrong = build(planned(tmp_path), tmp_path / "wrong", BuildOptions("tvm"))
    assert main([*words, str(wrong)]) == 5
    said = capsys.readouterr()
    assert re.search(r"first wrong: s0.F/k\d+ \(.*relu\)", said.out), said.out + said.err
    assert "%relu1 of place 0 of the mesh" in said.out
    assert "Traceback" not in said.err


@pytest.mark.parametrize(("mesh", "schedule"), [("tp=2", "zb-1f1b"), ("tp=3", "2bw")])
def test_every_value_of_images_split_in_space_is_that_of_one_device(tmp_path: Path, mesh: str, schedule: str) -> None:
    """Two stages with uneven heights; in the first schedule the gradients of weights are apart."""
    write_resnet(tmp_path / "resnet.onnx", 2, blocks=(1, 1), width=4, size=21, classes=4)
    plan = ps.plan(
        ps.from_onnx(tmp_path / "resnet.onnx"),
        ps.Cluster.local(2 * int(mesh[-1])),
        ps.Training("cross_entropy", ps.AdamW(lr=1e-2), MICROBATCHES, clip=1.0),
        schedule=schedule,
        stages=2,
        mesh=mesh,
        shard="preset:spatial",
    )
    off, comparison = first_off(plan)
    assert off is None
    assert comparison.compared > 300 * MICROBATCHES
