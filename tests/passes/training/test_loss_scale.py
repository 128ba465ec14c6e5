"""Loss scales: gradients are divided once a batch, by what their microbatches were multiplied by, whatever the schedule; and products add to them directly."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from tests.ir.verify.edits import message

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.text import parse_module, print_module
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.training.autodiff import LOSS_SCALE, SCALE_SUM

from .test_guard import M, batches_of, network, weights_of

PAIRS = ("cpu:0 cpu:1", "cpu:2 cpu:3")
# Settings, devices of stages, cuts.
CASES = {
    "gpipe": ({"schedule": "gpipe"}, ("cpu:0", "cpu:1"), ("layer2",)),
    "2bw": ({"schedule": "2bw"}, ("cpu:0", "cpu:1"), ("layer2",)),
    "zb-1f1b": ({"schedule": "zb-1f1b"}, ("cpu:0", "cpu:1", "cpu:2"), ("layer1", "layer3")),
    "interleaved": ({"schedule": "interleaved", "packs": 2}, ("cpu:0", "cpu:1"), ("layer1", "layer2", "layer3")),
    "elsewhere": ({"schedule": "2bw", "update_on": ("cpu:2",)}, ("cpu:0", "cpu:1"), ("layer2",)),
    "shares": ({"shares": (3, 1)}, ("cpu:0 cpu:1",), ()),
    "zero": ({"mesh": "dp=2", "zero": 2, "schedule": "2bw"}, PAIRS, ("layer2",)),
    "split": ({"mesh": "tp=2"}, PAIRS, ("layer2",)),
    "made again": ({"recompute": "all"}, ("cpu:0", "cpu:1"), ("layer2",)),
}


@functools.cache
def program(
    case: str, scale: float, tied: bool = False, frozen: tuple[str, ...] = (), precision: str = "f32"
) -> Module:
    options, devices, cuts = CASES[case]
    settings = {"microbatches": M, "guard": {"clip": 0.5, "grow_every": 2}, "precision": precision, **options}
    calls = training_pipeline(
        {"kind": "adamw", "lr": 0.1}, {"split_at": cuts, "devices": devices}, PipelineOptions(**settings)
    )
    scaled = [replace(c, options=replace(c.options, loss_scale=scale)) if c.name == "autodiff" else c for c in calls]
    module = network(tied=tied).but(cluster=Cluster.local(4))
    kept = {name: replace(var, role="buffer") if name in frozen else var for name, var in module.vars.items()}
    made = run_passes(module.but(vars=kept), scaled, PASSES)
    assert parse_module(print_module(made)) == made
    return made


def trained(module: Module):
    weights = {name: array for tied in (True, False) for name, array in weights_of(network(tied=tied)).items()}
    taken = {name: weights[name] for name, var in module.vars.items() if name in weights}
    return run_schedule(module, taken, batches_of(9, 3), precision="typed")


def same(one, other) -> bool:
    """The losses, the norms and all variables that both have."""
    arrays = [(one.variables[name], array) for name, array in other.variables.items()]
    arrays += [
        (one.handed_out[t][name], array) for t, named in other.handed_out.items() for name, array in named.items()
    ]
    arrays += [(np.array(one.losses, float), np.array(other.losses, float))]
    return all(np.array_equal(a, b, equal_nan=True) for a, b in arrays)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_a_scale_that_changes_every_other_batch_changes_no_bit(case: str, tied: bool) -> None:
    """Batch 3 is left out, and halves it. Under 2bw the batch after a change still has the old one."""
    scaled = trained(program(case, 1024.0, tied))
    assert same(scaled, trained(program(case, 0.0, tied)))
    assert float(scaled.variables[LOSS_SCALE]) == 4096.0


@pytest.mark.parametrize("frozen", [("w0", "w1"), ("w2", "w3")], ids="-".join)
def test_stages_without_parameters_take_the_sum_where_they_report_a_norm(frozen: tuple[str, ...]) -> None:
    module = program("2bw", 1024.0, frozen=frozen)
    assert same(trained(module), trained(program("2bw", 0.0, frozen=frozen)))
    taken = [{op.var for op in module.stage_graph(stage, "U").ops if op.kind == "take"} for stage in (0, 1)]
    # The last stage multiplies the loss, and changes the scale with the others.
    assert [SCALE_SUM in names for names in taken] == ["w0" not in frozen, True]


def test_control_the_newest_scale_is_not_that_of_the_batch() -> None:
    """An update that divides by what the scale is now: right if nothing is late, wrong under 2bw."""
    for case, right in (("gpipe", True), ("2bw", False)):
        module = program(case, 1024.0)
        graphs = dict(module.graphs)
        for name in ("s0.U", "s1.U"):
            ops = tuple(
                replace(op, kind="read", attrs={"var": LOSS_SCALE}) if op.attrs.get("var") == SCALE_SUM else op
                for op in graphs[name].ops
            )
            graphs[name] = replace(graphs[name], ops=ops)
        assert same(trained(module.but(graphs=graphs)), trained(program(case, 0.0))) == right


def test_nothing_stands_between_a_gradient_and_its_sum() -> None:
    """With f16 as with bf16 a gradient is widened and added, by the product that makes it."""
    for precision in ("bf16", "f16"):
        module = program("gpipe", 1024.0 if precision == "f16" else 0.0, precision=precision)
        for stage in (0, 1):
            graph = module.stage_graph(stage, "B")
            makers = graph.producers()
            added = {op.var: makers[op.ins[0]] for op in graph.ops if op.kind == "accum" and op.var != SCALE_SUM}
            assert len(added) == 2
            assert {op.kind for op in added.values()} == {"cast"}
            assert {makers[op.ins[0]].kind for op in added.values()} == {"matmul"}


def test_stages_that_do_not_add_the_same_are_refused() -> None:
    module = program("2bw", 1024.0)
    graph = module.stage_graph(1, "B")
    (factor,) = (
        op
        for op in graph.ops
        if op.kind == "mul"
        and op.outs[0] in {v for a in graph.ops if a.kind == "accum" and a.var == SCALE_SUM for v in a.ins}
    )
    changed = tuple(replace(op, kind="add") if op is factor else op for op in graph.ops)
    said = message(module.with_graph(replace(graph, ops=changed)), "staged")
    assert f"adds otherwise to @{SCALE_SUM} than @s0.B; each stage adds the same, for itself" in said
