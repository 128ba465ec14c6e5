"""Styles of torch's `parallelize_module`, given as they are: parameters lie as torch lays them out itself, values as
the styles say, and the program means what it meant."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock as ps
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.text import parse_module, print_module
from penstock.passes.sharding.written import layouts_of
from penstock.support.errors import UsageError

TOKENS, WIDTH, HIDDEN, VOCABULARY = 8, 4, 12, 10


class Block(nn.Module):
    """A part of a transformer: a norm, two products, and the stream around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Net(nn.Module):
    """Two blocks between a table and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> ps.Model:
    torch.manual_seed(0)
    return ps.from_torch(Net(), (torch.zeros(2, TOKENS, dtype=torch.long),))


@pytest.fixture
def torch_mesh() -> Iterator[DeviceMesh]:
    """A mesh of two devices of which this process is one, without any other process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


def planned(model: ps.Model, shard: object, **options: object) -> ps.Plan:
    return ps.plan(model, ps.Cluster.local(2), stages=1, mesh="tp=2", shard=shard, **options)


def types(plan: ps.Plan) -> dict[str, str]:
    graph = plan.reference.graphs["main"]
    values = {v.name: str(v.type) for op in graph.ops for v in op.outs}
    return (
        values
        | {v.name: str(v.type) for v in plan.module.inputs}
        | {n: str(v.type) for n, v in plan.module.vars.items()}
    )


# Sequence parallelism as in torch's tutorial of tensor parallelism: the stream is split along tokens.
SEQUENCE = {
    "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.fc1": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.fc2": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
PLANS: dict[str, dict[str, ParallelStyle]] = {
    "pair": {"blocks.*.fc1": ColwiseParallel(), "blocks.*.fc2": RowwiseParallel()},
    "columns": {"table": ColwiseParallel(output_layouts=Replicate()), "head": RowwiseParallel()},
    "rows": {"table": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)},
    "sequence": SEQUENCE,
}


@pytest.mark.parametrize("name", PLANS)
def test_parameters_lie_as_torch_lays_them_out(name, model, torch_mesh):
    net = parallelize_module(Net(), torch_mesh, PLANS[name], src_data_rank=None)
    expected = {
        key: [i == p.placements[0].dim if p.placements[0].is_shard() else False for i in range(p.dim())]
        for key, p in net.named_parameters()
        if hasattr(p, "placements")
    }
    assert any(any(split) for split in expected.values())
    variables = planned(model, PLANS[name]).module.vars
    ours = {key: [bool(variables[key].type.axes_of(i)) for i in range(len(dims))] for key, dims in expected.items()}
    assert ours == expected
    # The control: another plan lays them out otherwise.
    other = planned(model, PLANS["columns" if name != "columns" else "pair"]).module.vars
    assert {key: [bool(other[key].type.axes_of(i)) for i in range(len(d))] for key, d in expected.items()} != expected


def test_values_lie_as_styles_say(model):
    laid = types(planned(model, SEQUENCE))
    stream = f"f32[2,{TOKENS}/tp,{WIDTH}]"
    assert {laid[name] for name in ("embedding", "layer_norm", "linear_1", "add", "add_1")} == {stream}
    assert laid["linear"] == f"f32[2,{TOKENS},{HIDDEN}/tp]"
    # The control: a pair alone leaves the stream whole.
    assert types(planned(model, PLANS["pair"]))["add"] == stream.replace("/tp", "")


def test_inputs_and_results_of_modules(model):
    style = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    assert types(planned(model, {"": style}))["tokens"] == f"i64[2,{TOKENS}/tp]"
    by_name = PrepareModuleInput(
        input_kwarg_layouts={"tokens": Shard(1)}, desired_input_kwarg_layouts={"tokens": Replicate()}
    )
    assert types(planned(model, {"": by_name}))["tokens"] == f"i64[2,{TOKENS}/tp]"
    out = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-1))
    laid = types(planned(model, {"blocks.0": out}))
    assert laid["add"] == f"f32[2,{TOKENS},{WIDTH}/tp]"
    both = PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        output_layouts=Shard(1),
        desired_output_layouts=Shard(1),
    )
    laid = types(planned(model, {"blocks.1": both}))
    assert laid["add"] == laid["add_1"] == f"f32[2,{TOKENS}/tp,{WIDTH}]"


@pytest.mark.parametrize("name", PLANS)
def test_programs_mean_what_they_meant(name, model):
    plan = planned(model, PLANS[name])
    tokens = np.arange(2 * TOKENS).reshape(2, TOKENS) % VOCABULARY
    store = DictStore({key: np.asarray(x, np.float64) for key, x in model.imported.weights.items()})
    results = [
        run_graph(module.graphs["main"], {"tokens": tokens}, store, "f64")[0]
        for module in (model.module, plan.reference)
    ]
    np.testing.assert_allclose(*results, rtol=1e-12)
    assert parse_module(print_module(plan.module)) == plan.module
    # What a plan file says is the same plan.
    again = planned(model, plan.as_dict()["shard"])
    assert print_module(again.module) == print_module(plan.module)


def test_one_error_names_all_that_is_not_known():
    class Ours(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return module

    plan = {"a": Ours(), "b": "Diagonal", "c": ColwiseParallel(output_layouts=Partial()), "d": RowwiseParallel()}
    with pytest.raises(UsageError) as refused:
        layouts_of(plan)
    assert all(
        x in refused.value.what
        for x in ("'a' has the style Ours", "'b' has the style Diagonal", "'c' has the placement Partial")
    )
    assert "'d'" not in refused.value.what
    assert "SequenceParallel" in refused.value.hint


def test_one_error_names_all_modules_that_do_not_fit(model):
    both = (Shard(1), Replicate())
    plan = {
        "blocks.*.norm": ColwiseParallel(),
        "middle": RowwiseParallel(),
        "blocks.7": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=both, desired_input_layouts=both),
        "table": PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": Shard(0)}),
    }
    with pytest.raises(UsageError) as refused:
        planned(model, plan)
    for words in (
        "blocks.0.norm.weight is read by layer_norm; styles are of linear modules and embeddings",
        "no parameter is called middle.weight",
        "no module is called blocks.7",
        "module head takes 1 value (add_1), 2 are laid out",
        "arguments of module table are not known by their names",
    ):
        assert words in refused.value.what
