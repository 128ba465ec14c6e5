"""Mixed precision: where the types go, that nothing but rounding changes, and that a GPT trains the same way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock import api
from penstock.frontends.training import Training, attach_loss, load_training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import PARAM, SETTING, STATE, Module, Op, Var, rewrite
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64, TYPED
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.ops import make
from penstock.ir.training.optimizers import AdamW
from penstock.ir.types import UNIT_ROUNDOFF
from penstock.models import write_cnn, write_gpt
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, inference_pipeline, training_pipeline
from penstock.passes.rewrite.precision import PrecisionOptions, precision
from penstock.passes.training.optimizer import OptimizerOptions, optimizer
from penstock.support.errors import UsageError

from .main_graph import main_of

MICROBATCHES = 2


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocab": 48, "positions": 16, "batch": 2}
    return api.from_onnx(write_gpt(tmp_path_factory.mktemp("gpt") / "gpt.onnx", **sizes))


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    return api.from_onnx(write_cnn(tmp_path_factory.mktemp("cnn") / "cnn.onnx", 4, size=12))


TRAINING = Training("cross_entropy", AdamW(lr=3e-3), MICROBATCHES)


def trained(model: api.Model, compute: str, stages: int = 2, until: str = "") -> Module:
    module = attach_loss(model.module.but(cluster=Cluster.local(stages)), TRAINING)
    calls = training_pipeline(
        TRAINING.optimizer.pass_options(),
        {"stages": stages},
        PipelineOptions(schedule="1f1b", microbatches=MICROBATCHES, precision=compute),
    )
    names = [call.name for call in calls]
    return run_passes(module, calls[: names.index(until)] if until else calls, PASSES)


def types(module: Module, *kinds: str) -> set[str]:
    return {
        v.type.dtype for g in module.graphs.values() for op in g.ops if op.kind in kinds for v in (*op.ins, *op.outs)
    }


def test_products_and_activations_are_low_and_state_is_not(gpt: api.Model) -> None:
    module = trained(gpt, "bf16")
    assert types(module, "matmul") == {"bf16"}
    assert types(module, "layer_norm", "layer_norm_grad", "adamw") <= {"f32"}
    assert types(module, "cross_entropy", "accum") <= {"f32", "i64"}
    assert {
        v.type.dtype for v in module.vars.values() if v.role == PARAM or v.name.endswith((".grad", "adam_m", "adam_v"))
    } == {"f32"}
    assert module.inputs == trained(gpt, "f32").inputs
    assert module.outputs == ("loss",)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_what_crosses_stages_is_low(gpt: api.Model, stages: int) -> None:
    module, plain = trained(gpt, "bf16", stages), trained(gpt, "f32", stages)
    assert {v.type.dtype for e in module.edges for v in e.values} == {"bf16"}
    assert {v.type.dtype for e in plain.edges for v in e.values} == {"f32"}


def test_what_is_saved_is_low_but_for_statistics(gpt: api.Model) -> None:
    module, plain = trained(gpt, "bf16"), trained(gpt, "f32")

    def saved(m: Module) -> dict[str, int]:
        return {v.name: v.type.nbytes for g in m.graphs.values() for v in g.saved if v.type.dtype in ("f32", "bf16")}

    wide = {v.name for g in module.graphs.values() for v in g.saved if v.type.dtype == "f32"}
    assert all("layer_norm" in name or name.endswith((".largest", ".sum")) or name == "loss.lse" for name in wide), wide
    assert sum(saved(module).values()) < 0.6 * sum(saved(plain).values())


def inputs_of(module: Module, seed: int, count: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for v in module.inputs:
        shape = (v.type.dims[0] * count, *v.type.dims[1:])
        found[v.name] = (
            rng.integers(0, 10, shape) if v.type.dtype == "i64" else rng.standard_normal(shape).astype(np.float32)
        )
    return found


def roundings_on_the_way(module: Module) -> int:
    """How many 16-bit results lie one behind the other at most."""
    depth: dict[str, int] = {}
    for op in module.graphs["main"].ops:
        before = max((depth.get(v.name, 0) for v in op.ins), default=0)
        depth |= {v.name: before + (v.type.dtype in ("bf16", "f16")) for v in op.outs}
    return max(depth.values())


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("which", ["gpt", "cnn"])
def test_inference_differs_by_rounding_only(which: str, half: str, request: pytest.FixtureRequest) -> None:
    """In float64 the casts mean nothing, and the results are the same. Rounded where the IR says, they differ by no more than independent
    roundings of u each add up to: u times the root of their number (relative to the largest output)."""
    model = request.getfixturevalue(which)
    simple = run_passes(model.module, inference_pipeline({"stages": 1}, PipelineOptions(microbatches=1))[:2], PASSES)
    lowered = precision(simple, PrecisionOptions(half))
    feeds = inputs_of(simple, 1)

    def run(module: Module, how: str) -> list[np.ndarray]:
        store = DictStore(initial_arrays(module, model.imported.weights, list(module.vars), how))
        return [x.astype(np.float64) for x in run_graph(module.graphs["main"], feeds, store, precision=how)]

    assert [v.type for v in lowered.graphs["main"].outs] == [v.type for v in simple.graphs["main"].outs]
    assert [v.name for v in lowered.graphs["main"].outs] == list(simple.outputs)
    (exact,), (same,), (rounded,) = run(simple, F64), run(lowered, F64), run(lowered, TYPED)
    assert np.abs(exact - same).max() < 1e-13 * np.abs(exact).max()
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    u = UNIT_ROUNDOFF[half]
    assert u / 16 < error < u * np.sqrt(roundings_on_the_way(lowered))


def batches_of(steps: int) -> list[dict[str, np.ndarray]]:
    """Counting: each token is followed by the next number, now and then by any."""
    rng = np.random.default_rng(5)
    tokens = (rng.integers(0, 48, (steps, 2 * MICROBATCHES, 1)) + np.arange(17)) % 48
    tokens = np.where(rng.random(tokens.shape) < 0.05, rng.integers(0, 48, tokens.shape), tokens)
    return [{"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


def losses(model: api.Model, compute: str) -> list[float]:
    module = trained(model, compute, until="partition")
    return run_recurrence(module, model.imported.weights, batches_of(40), precision=TYPED).losses


def test_a_gpt_trains_to_the_same_loss(gpt: api.Model) -> None:
    plain, low = losses(gpt, "f32"), losses(gpt, "bf16")
    assert plain[-1] < 0.6 * plain[0]
    # Every loss within 2 % of that in f32, their mean over the last quarter within 1 %.
    assert np.allclose(low, plain, rtol=2e-2)
    assert abs(np.mean(low[-20:]) / np.mean(plain[-20:]) - 1) < 1e-2
    assert low != plain


def test_weights_kept_in_16_bits_would_not_learn(gpt: api.Model) -> None:
    """Control of the master weights: steps of 1e-3 from 1 are lost where the weight is rounded to bf16, whose next number is 1 - 2^-8."""

    def trained_norm(module: Module) -> np.ndarray:
        run = run_recurrence(module, gpt.imported.weights, batches_of(4), precision=TYPED)
        return run.variables["h.0.ln_1.weight"]

    module = trained(gpt, "bf16", until="partition")

    def round_what_is_written(op: Op) -> list[Op] | None:
        if op.kind != "write" or module.vars[op.var].role != PARAM:
            return None
        low = make("cast", op.ins, [f"{op.ins[0].name}.low"], dtype="bf16")
        wide = make("cast", low.outs, [f"{op.ins[0].name}.wide"], dtype="f32")
        return [low, wide, Op("write", wide.outs, (), op.attrs)]

    options = OptimizerOptions("adamw", lr=1e-3)
    module = module.but(graphs={k: v for k, v in module.graphs.items() if k != "U"}, vars=without_state(module))
    module = optimizer(module, options)
    update = module.graphs["U"]
    assert np.median(np.abs(trained_norm(module) - 1)) > 1e-3
    assert (trained_norm(module.with_graph(rewrite(update, round_what_is_written))) == 1).all()


def without_state(module: Module) -> dict[str, Var]:
    return {name: var for name, var in module.vars.items() if var.role not in (STATE, SETTING)}


def test_casts_that_undo_each_other_are_gone(gpt: api.Model) -> None:
    """The gradient of bf16(f32(x)) is not rounded twice."""
    module = trained(gpt, "bf16", until="partition")
    for graph in module.graphs.values():
        makers = graph.producers()
        for op in graph.ops:
            inner = makers.get(op.ins[0]) if op.kind == "cast" else None
            if inner is not None and inner.kind == "cast":
                assert (inner.ins[0].type.dtype, op.outs[0].type.dtype) != ("bf16", "bf16")


def test_constants_that_16_bits_do_not_hold_keep_their_value() -> None:
    body = """%w : f32[3,4] = read(@w)
    %h : f32[2,4] = matmul(%x, %w)
    %tenth : f32[] = const(value=0.1, dtype=f32)
    %half : f32[] = const(value=0.5, dtype=f32)
    %lowest : f32[] = const(value=-3.4e38, dtype=f32)
    %a : f32[2,4] = mul(%h, %tenth)
    %b : f32[2,4] = mul(%a, %half)
    %c : f32[2,4] = add(%b, %lowest)
    %y : f32[2,4] = softmax(%c)"""
    module = main_of("%x : f32[2,3]", body, "%y", ["input %x : f32[2,3]", "output %y", "var @w : f32[3,4] param"])
    module = precision(module, PrecisionOptions("bf16"))
    by_name = {op.outs[0].name: op for op in module.graphs["main"].ops if op.outs}
    assert [v.type.dtype for v in by_name["a.f32"].ins] == ["f32", "f32"]
    assert [v.type.dtype for v in by_name["b"].ins] == ["bf16", "bf16"]
    assert by_name["c"].outs[0].type.dtype == "f32"
    assert module.graphs["main"].outs[0].type.dtype == "f32"


def test_f16_is_trained_with_a_scaled_loss_and_unknown_types_are_refused(tmp_path: Path, gpt: api.Model) -> None:
    names = [
        call.name
        for call in training_pipeline({}, {}, PipelineOptions(schedule="1f1b", microbatches=1, precision="f16"))
    ]
    assert names.index("autodiff") < names.index("guard") < names.index("split")
    assert "guard" not in [
        call.name
        for call in training_pipeline({}, {}, PipelineOptions(schedule="1f1b", microbatches=1, precision="bf16"))
    ]
    assert Training("mse", precision="f16", clip=0.5).guard_options() == {"clip": 0.5}
    with pytest.raises(UsageError, match="clip must be 0 or more"):
        Training("mse", clip=-1.0)
    with pytest.raises(UsageError, match="one of f32, bf16, f16"):
        precision(gpt.module, PrecisionOptions("fp8"))
    (tmp_path / "train.toml").write_text('loss = "mse"\nprecision = "bf16"\n')
    assert load_training(tmp_path / "train.toml").precision == "bf16"


def test_settings_choose_the_precision_and_the_argument_overrides_them(gpt: api.Model) -> None:
    settings = Training("cross_entropy", precision="bf16")
    assert "precision" in [c.name for c in api.plan(gpt, Cluster.local(1), settings).calls]
    assert "precision" not in [c.name for c in api.plan(gpt, Cluster.local(1), settings, precision="f32").calls]
    found = api.plan(gpt, Cluster.local(1), precision="f16")
    assert types(found.module, "matmul") == {"f16"}
