"""Values that cross stages in 16 bits: the same as torch with the same roundings at the same places, half of the bytes, and nothing else changed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.drawn_chains import chain_model

import penstock as ps
from penstock.ir.graph import Module
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import check
from penstock.models import write_gpt, write_mlp
from penstock.passes.communicate.wire import WireOptions, round_trips, wire
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.support.errors import UsageError

SIZES, ROWS, PARTS, RATE = (6, 16, 16, 5), 4, 2, 0.2
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ps.Model:
    return ps.from_onnx(write_mlp(tmp_path_factory.mktemp("mlp") / "mlp.onnx", SIZES, ROWS, seed=3))


def planned(model: ps.Model, kind: str = "1f1b", dtype: str = "bf16") -> ps.Plan:
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=RATE), microbatches=PARTS)
    return ps.plan(model, ps.Cluster.local(3), training, schedule=kind, split_at=products[1:], wire=dtype)


def drawn(count: int) -> list[dict[str, np.ndarray]]:
    random, rows = np.random.default_rng(5), ROWS * PARTS
    return [
        {
            "x": random.standard_normal((rows, SIZES[0])).astype(np.float32),
            "labels": random.integers(0, SIZES[-1], rows),
        }
        for _ in range(count)
    ]


class Through(torch.autograd.Function):
    """A boundary: the activation and the gradient are rounded on their way."""

    @staticmethod
    def forward(context, x, dtype):  # type: ignore[no-untyped-def]
        context.dtype = dtype
        return x.to(dtype).float()

    @staticmethod
    def backward(context, gradient):  # type: ignore[no-untyped-def]
        return gradient.to(context.dtype).float(), None


def trained_by_torch(model: ps.Model, batches: list[dict[str, np.ndarray]], dtype: torch.dtype) -> list[float]:
    """Losses of all microbatches; float32 rounds nothing."""
    arrays = model.imported.weights
    layers = [(n, n.replace("weight", "bias")) for n in arrays if arrays[n].ndim == 2]
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    losses = []
    for batch in batches:
        total = torch.zeros(())
        for k in range(PARTS):
            rows = slice(k * ROWS, (k + 1) * ROWS)
            h = torch.tensor(batch["x"][rows])
            for i, (weight, bias) in enumerate(layers):
                h = h @ tensors[weight] + tensors[bias]
                if i < len(layers) - 1:
                    h = Through.apply(torch.relu(h), dtype)
            loss = torch.nn.functional.cross_entropy(h, torch.tensor(batch["labels"][rows]))
            losses.append(float(loss.detach()))
            total = total + loss / PARTS
        total.backward()
        with torch.no_grad():
            for tensor in tensors.values():
                tensor -= RATE * tensor.grad
                tensor.grad = None
    return losses


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", ["1f1b", "zb-1f1b"])
def test_training_is_torch_with_the_same_roundings(model: ps.Model, kind: str, dtype: str) -> None:
    batches = drawn(4)
    module = planned(model, kind, dtype).module
    check(module, tuple(dict.fromkeys(("typed", *module.facts))))
    found = np.array(run_schedule(module, model.imported.weights, batches, precision=TYPED).losses)
    expected, plain = (np.array(trained_by_torch(model, batches, t)) for t in (TORCH[dtype], torch.float32))
    assert np.abs(found - expected).max() < 1e-6
    # Controls: the roundings are seen, and without the pass there are none.
    assert np.abs(found - plain).max() > 1e-5
    whole = planned(model, kind, "f32").module
    assert (
        np.abs(np.array(run_schedule(whole, model.imported.weights, batches, precision=TYPED).losses) - plain).max()
        < 1e-6
    )


def test_the_text_says_it_and_messages_have_half_the_bytes(model: ps.Model) -> None:
    def bytes_of(module: Module) -> list[int]:
        return [sum(value.type.nbytes for value in edge.values) for edge in module.edges]

    low, whole = planned(model).module, planned(model, dtype="f32").module
    assert [2 * n for n in bytes_of(low)] == bytes_of(whole)
    assert {value.type.dtype for edge in low.edges for value in edge.values} == {"bf16"}
    text = print_module(low)
    assert parse_module(text) == low
    sent, taken = low.edges[0].values[0], low.graphs["s1.F"]
    assert f"%{sent.name} : {sent.type} = cast(" in text
    assert taken.ins == (sent,)
    assert any(op.kind == "cast" and op.ins == (sent,) for op in taken.ops)
    assert any("travel as bf16" in note.text for note in low.notes)
    assert "wire" not in planned(model, dtype="f32").to_json().partition('"pipeline"')[2].partition("\n")[0]


def test_the_whole_model_with_round_trips_is_about_as_far_off(model: ps.Model) -> None:
    """What `penstock verify` takes its tolerance from."""
    plan, batches = planned(model), drawn(3)
    whole, found = (
        np.array(run.losses)
        for run in (
            run_recurrence(plan.reference, model.imported.weights, batches),
            run_schedule(plan.module, model.imported.weights, batches, precision=TYPED),
        )
    )
    rounding = round_trips(plan.reference, plan.module)
    casts = [
        sum(op.kind == "cast" for graph in m.graphs.values() for op in graph.ops) for m in (plan.reference, rounding)
    ]
    assert casts[1] - casts[0] == 2 * 4
    near = np.array(run_recurrence(rounding, model.imported.weights, batches, precision=TYPED).losses)
    assert np.abs(found - whole).max() < 4 * np.abs(near - whole).max() < 0.1
    assert round_trips(plan.reference, planned(model, dtype="f32").module) == plan.reference


def test_only_what_travels_is_rounded(tmp_path: Path) -> None:
    """A GPT on three stages: each forward graph gives, on rounded inputs, what it gave; integers and outputs stay."""
    path = write_gpt(tmp_path / "gpt.onnx", layers=2, width=16, heads=2, vocab=24, positions=8, batch=2)
    model, cluster = ps.from_onnx(path), ps.Cluster.local(3)
    whole, low = (ps.plan(model, cluster, wire=dtype).module for dtype in ("f32", "bf16"))
    tokens = np.random.default_rng(0).integers(0, 24, (2, 8))
    batch = [{whole.data_inputs[0].name: tokens}]
    exact, rounded = (run_schedule(m, model.imported.weights, batch, precision=TYPED).outputs for m in (whole, low))
    assert low.outputs == whole.outputs
    for name in whole.outputs:
        a, b = (np.asarray(r[name]) for r in (exact[0], rounded[0]))
        assert a.dtype == b.dtype
        assert 0 < np.abs(a - b).max() < 0.05 * np.abs(a).max()


def test_a_wire_that_does_not_exist_and_one_that_is_late(model: ps.Model) -> None:
    with pytest.raises(UsageError, match="--wire is one of f32, bf16, f16, not 'i8'"):
        planned(model, dtype="i8")
    with pytest.raises(UsageError, match="cannot travel as 'i8', expected one of f32, bf16, f16"):
        wire(planned(model, dtype="f32").module, WireOptions("i8"))
    with pytest.raises(UsageError, match="sends and receives are there already"):
        wire(planned(model, dtype="f32").module, WireOptions())


def test_a_value_that_several_stages_take_is_widened_on_each():
    """A residual goes past a stage, and so does its gradient: to other devices, or to another stage of the same one."""
    cuts = {"split_at": ("layer1", "layer2", "layer3")}

    def trained(dtype: str, kind: str, packs: int) -> tuple[Module, list[float]]:
        model = chain_model([8, 8, 8, 8, 8], [(0, 2), (1, 3)]).but(cluster=ps.Cluster.local(4 // packs))
        options = PipelineOptions(schedule=kind, microbatches=PARTS, packs=packs, recompute="none", wire=dtype)
        module = run_passes(model, training_pipeline({"kind": "sgd", "lr": 0.1}, cuts, options), PASSES)
        draw = np.random.default_rng(5)
        weights = {n: draw.standard_normal(v.type.dims).astype("f4") for n, v in model.vars.items()}
        batches = [
            {v.name: draw.standard_normal((PARTS * v.type.dims[0], 8)).astype("f4") for v in model.inputs}
            for _ in range(3)
        ]
        return module, [float(loss) for loss in run_schedule(module, weights, batches, precision=TYPED).losses]

    module, losses = trained("bf16", "1f1b", 1)
    takers = Counter(value.name for edge in module.edges if edge.phase == "F" for value in edge.values)
    assert max(takers.values()) == 2
    assert trained("bf16", "interleaved", 2)[1] == trained("bf16", "zb-v", 2)[1] == losses
    whole = trained("f32", "1f1b", 1)[1]
    assert losses != whole
    np.testing.assert_allclose(losses, whole, rtol=0.03)
