"""Update graphs against torch.optim, over many steps in float64, through the training recurrence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.ir.errors import UsageError
from penstock.ir.interp import run_recurrence
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify import check
from penstock.passes.autodiff import AutodiffOptions, autodiff
from penstock.passes.optimizers import OptimizerOptions, optimizer
from penstock.passes.simplify import SimplifyOptions, simplify

M, STEPS = 3, 25
TEXT = """module @regression {
  input %x : f32[4,3]
  input %target : f32[4,2]
  output %loss
  var @w : f32[3,2] param
  var @b : f32[2] param
  var @frozen : f32[2] buffer
  var @idle : f32[2] param
  graph @main(%x : f32[4,3], %target : f32[4,2]) {
    %w : f32[3,2] = read(@w)
    %b : f32[2] = read(@b)
    %frozen : f32[2] = read(@frozen)
    %h : f32[4,2] = matmul(%x, %w)
    %hb : f32[4,2] = add(%h, %b)
    %t : f32[4,2] = tanh(%hb)
    %y : f32[4,2] = mul(%t, %frozen)
    %loss : f32[] = mse(%y, %target)
    return %loss
  }
}
"""


def data():
    rng = np.random.default_rng(5)
    weights = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2), "frozen": rng.normal(size=2), "idle": rng.normal(size=2)}
    batches = [{"x": rng.normal(size=(4 * M, 3)), "target": rng.normal(size=(4 * M, 2))} for _ in range(STEPS)]
    return weights, batches


def trained(options, delay=0):
    module = optimizer(autodiff(parse_module(TEXT), AutodiffOptions(M)), options)
    check(module, ("typed", "differentiated"))
    weights, batches = data()
    run = run_recurrence(module, weights, batches, delay)
    after = run_recurrence(simplify(module, SimplifyOptions()), weights, batches, delay)
    np.testing.assert_allclose(after.losses, run.losses, rtol=1e-12)
    return run


def torch_trained(make):
    """A plain training loop: mean loss over the microbatches, one step per batch."""
    weights, batches = data()
    t = {name: torch.tensor(x, requires_grad=name != "frozen") for name, x in weights.items()}
    opt = make([t["w"], t["b"], t["idle"]])
    losses = []
    for batch in batches:
        opt.zero_grad()
        for x, target in zip(*(torch.tensor(batch[n]).split(4) for n in ("x", "target")), strict=True):
            loss = torch.nn.functional.mse_loss(torch.tanh(x @ t["w"] + t["b"]) * t["frozen"], target)
            (loss / M).backward()
            losses.append(loss.item())
        opt.step()
    return losses, {name: x.detach().numpy() for name, x in t.items()}


CASES = [
    (OptimizerOptions("sgd", 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (OptimizerOptions("sgd", 0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)),
    (OptimizerOptions("momentum", 0.05), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    (OptimizerOptions("momentum", 0.05, 0.1, beta=0.7), lambda p: torch.optim.SGD(p, 0.05, momentum=0.7, weight_decay=0.1)),
    (
        OptimizerOptions("momentum", 0.05, 0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    (OptimizerOptions("adamw", 0.03), lambda p: torch.optim.AdamW(p, 0.03, weight_decay=0.0)),
    (
        OptimizerOptions("adamw", 0.03, 0.1, beta1=0.8, beta2=0.95, eps=1e-6),
        lambda p: torch.optim.AdamW(p, 0.03, (0.8, 0.95), 1e-6, 0.1),
    ),
]


@pytest.mark.parametrize(("options", "make"), CASES)
def test_training_equals_torch(options, make):
    run = trained(options)
    losses, weights = torch_trained(make)
    assert len(run.losses) == M * STEPS
    np.testing.assert_allclose(run.losses, losses, rtol=1e-9)
    for name, expected in weights.items():
        np.testing.assert_allclose(run.variables[name], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("changed", [{"lr": 0.031}, {"weight_decay": 0.11}, {"beta1": 0.81}, {"beta2": 0.951}, {"eps": 1e-5}])
def test_control_every_option_of_adamw_matters(changed):
    options, make = CASES[-1]
    wrong = OptimizerOptions(**{**{f: getattr(options, f) for f in options.__dataclass_fields__}, **changed})
    losses, _ = torch_trained(make)
    assert np.abs(np.array(trained(wrong).losses) / losses - 1).max() > 1e-7


def test_state_and_names():
    module = optimizer(autodiff(parse_module(TEXT), AutodiffOptions()), OptimizerOptions("adamw"))
    state = {name: str(var.type) for name, var in module.vars.items() if var.role == "state"}
    assert state == {"w.adam_m": "f32[3,2]", "w.adam_v": "f32[3,2]", "b.adam_m": "f32[2]", "b.adam_v": "f32[2]", "step": "i64[]"}
    assert all(module.vars[name].init == "zeros" for name in state)
    update = module.graphs["U"]
    assert not update.ins
    assert not update.outs
    assert [op.var for op in update.ops if op.kind == "write"].count("step") == 1
    assert sum(op.kind == "pow" for op in update.ops) == 2  # the corrections are computed once, not per parameter
    names = {v.name for g in (module.graphs["F"], module.graphs["B"]) for op in g.ops for v in op.outs}
    assert not names & {v.name for op in update.ops for v in op.outs}  # the newest version is another tensor than the microbatch's
    assert print_module(parse_module(print_module(module))) == print_module(module)


def test_steps_are_counted():
    assert int(trained(OptimizerOptions("adamw")).variables["step"]) == STEPS


def test_bad_options_are_listed_together():
    module = autodiff(parse_module(TEXT), AutodiffOptions())
    with pytest.raises(UsageError) as caught:
        optimizer(module, OptimizerOptions("adamax", -1.0, beta1=1.0))
    for part in ("adamax", "sgd, momentum, adamw", "lr", "beta1"):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="already"):
        optimizer(optimizer(module, OptimizerOptions()), OptimizerOptions())
    taken = module.but(vars={**module.vars, "step": module.vars["b"]})
    with pytest.raises(UsageError, match="@step"):
        optimizer(taken, OptimizerOptions("adamw"))
