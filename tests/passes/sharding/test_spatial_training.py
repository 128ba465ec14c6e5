"""A network of convolutions that is trained with its images split: weights and losses of several steps are those of one
device, with batch norms that take the statistics of the whole batch, and heights that do not divide."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from oracles.sharding.drawn_programs import DrawnProgram, laid_program
from oracles.sharding.laid_out import cut_out, put_together
from torch import nn

import penstock as ps
from penstock.ir.graph import Graph, Module
from penstock.ir.interpreter.graphs import run_team
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.verify.verifier import check
from penstock.planning.pipeline import before_partition

STEPS, BATCH, SIZE, CLASSES = 4, 3, 13, 5


class Residual(nn.Module):
    """A convolution with stride and a residual block of grouped and dilated ones, each with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, groups=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        )
        self.mean = nn.AvgPool2d(2, 2, 1, count_include_pad=False)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        x = self.mean(torch.relu(self.body(x) + x))
        return self.last(x.mean((2, 3)))


@cache
def model() -> ps.Model:
    torch.manual_seed(0)
    return ps.from_torch(Residual().train(), (torch.randn(BATCH, 2, SIZE, SIZE),))


@cache
def program() -> Module:
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), 1)
    return before_partition(model(), ps.Cluster.local(1), training)


def split_program(mesh: str) -> DrawnProgram:
    return laid_program(program(), mesh, ("preset:spatial",))


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    image, labels = program().data_inputs
    return [
        {image.name: rng.normal(size=image.type.dims), labels.name: rng.integers(0, CLASSES, labels.type.dims)}
        for _ in range(STEPS)
    ]


def held_weights() -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(x) for name, x in model().imported.weights.items()}
    return {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in arrays.items()}


def trained_split(local: Module, weights: dict[str, np.ndarray]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses of all steps, and the variables afterwards, of the ranks of a mesh in lockstep."""
    mesh, losses = local.mesh_of(0), list[float]()
    places = range(len(mesh.devices))
    first = initial_arrays(local, weights, list(local.vars), "f64")
    stores = [
        DictStore({name: cut_out(np.asarray(x), local.vars[name].type, mesh, place) for name, x in first.items()})
        for place in places
    ]
    for batch in batches():
        held = [{v.name: cut_out(batch[v.name], v.type, mesh, place) for v in local.data_inputs} for place in places]
        for graph in (g for kind in "FBU" if (g := local.stage_graph(0, kind)) is not None):
            results = run_team(graph, held, mesh, stores, "f64")
            held = [
                h | dict(zip((v.name for v in graph.results), r, strict=True))
                for h, r in zip(held, results, strict=True)
            ]
        found = [float(h[local.outputs[0]]) for h in held]
        assert len(set(found)) == 1
        losses.append(found[0])
    variables = {
        name: put_together([np.asarray(s.arrays[name]) for s in stores], var.type, mesh)
        for name, var in local.vars.items()
    }
    return losses, variables


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
def test_several_steps_are_those_of_one_device(mesh: str) -> None:
    case = split_program(mesh)
    check(case.sharded, ("typed", "sharded"))
    check(case.local, ("typed", "local"))
    kinds = {op.kind for graph in case.local.graphs.values() for op in graph.ops}
    assert {"shift", "where", "conv_grad_weight", "avg_pool_grad", "max_pool_grad"} <= kinds
    weights = held_weights()
    alone = run_recurrence(program(), weights, batches())
    losses, variables = trained_split(case.local, weights)
    np.testing.assert_allclose(losses, alone.losses, rtol=1e-10)
    for name, right in alone.variables.items():
        np.testing.assert_allclose(variables[name], right, rtol=1e-7, atol=1e-9, err_msg=name)
    assert len(set(losses)) == STEPS


def test_control_rows_of_no_neighbour_are_noticed() -> None:
    """Every rank takes its own rows for those of its neighbours."""
    case = split_program("tp=2")
    local = case.local
    for graph in local.graphs.values():
        ops = tuple(op.with_attrs(by=0) if op.kind == "shift" else op for op in graph.ops)
        local = local.with_graph(Graph(graph.name, graph.ins, graph.outs, ops, graph.saved))
    weights = held_weights()
    losses, _ = trained_split(case.local, weights)
    wrong, _ = trained_split(local, weights)
    assert not np.allclose(losses, wrong, rtol=1e-4)
