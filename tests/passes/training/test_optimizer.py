"""Update graphs against torch.optim and torch.optim.lr_scheduler, over many steps in float64, through the training recurrence."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedulers

from penstock.ir.graph import PARAM, SETTING, Value
from penstock.ir.interpreter.ops import apply_op
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.ops import make
from penstock.ir.text import parse_module, print_module
from penstock.ir.training.rates import COLUMNS, CURVE, LR, ROWS, Constant, Cosine, Linear, Steps, parse_rate
from penstock.ir.types import TensorType
from penstock.ir.verify.verifier import check
from penstock.passes.manager import parse_pipeline, print_pipeline, run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify
from penstock.passes.training import optimizer as optimizers
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.passes.training.optimizer import OptimizerOptions, optimizer
from penstock.support.errors import UsageError, VerifyError

M, STEPS = 3, 100
# A wide and a tall matrix, vectors, one that stays as it is and one that the loss does not depend on.
TEXT = """module @regression {
  input %x : f32[4,3]
  input %target : f32[4,2]
  output %loss
  var @w : f32[3,5] param
  var @b : f32[5] param
  var @u : f32[5,2] param
  var @frozen : f32[2] buffer
  var @idle : f32[2] param
  graph @main(%x : f32[4,3], %target : f32[4,2]) {
    %w : f32[3,5] = read(@w)
    %b : f32[5] = read(@b)
    %u : f32[5,2] = read(@u)
    %frozen : f32[2] = read(@frozen)
    %h : f32[4,5] = matmul(%x, %w)
    %hb : f32[4,5] = add(%h, %b)
    %t : f32[4,5] = tanh(%hb)
    %z : f32[4,2] = matmul(%t, %u)
    %y : f32[4,2] = mul(%z, %frozen)
    %loss : f32[] = mse(%y, %target)
    return %loss
  }
}
"""
NAMES = ("w", "b", "u", "idle")


def data():
    rng = np.random.default_rng(5)
    shapes = {"w": (3, 5), "b": (5,), "u": (5, 2), "frozen": (2,), "idle": (2,)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    batches = [{"x": rng.normal(size=(4 * M, 3)), "target": rng.normal(size=(4 * M, 2))} for _ in range(STEPS)]
    return weights, batches


def updated(options):
    return optimizer(autodiff(parse_module(TEXT), AutodiffOptions(M)), options)


def trained(options):
    module = updated(options)
    check(module, ("typed", "differentiated"))
    weights, batches = data()
    return run_recurrence(module, weights, batches, 0)


@functools.cache
def trained_once(options):
    return trained(options)


@functools.cache
def torch_trained(make):
    """A plain training loop: mean loss over the microbatches, one step per batch. `make` gives optimisers and schedulers."""
    weights, batches = data()
    t = {name: torch.tensor(x, requires_grad=name != "frozen") for name, x in weights.items()}
    made = make(t)
    made = made if isinstance(made, list) else [made]
    losses, rates = [], []
    for batch in batches:
        for tensor in t.values():
            tensor.grad = None
        for x, target in zip(*(torch.tensor(batch[n]).split(4) for n in ("x", "target")), strict=True):
            loss = torch.nn.functional.mse_loss(torch.tanh(x @ t["w"] + t["b"]) @ t["u"] * t["frozen"], target)
            (loss / M).backward()
            losses.append(loss.item())
        rates.append(made[0].param_groups[0]["lr"])
        for each in made:
            each.step()
    return losses, {name: x.detach().numpy() for name, x in t.items()}, rates


class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, program 1."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad) + group["weight_decay"] * p
                p -= group["lr"] * update
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


@pytest.fixture(autouse=True)
def muon_in_float64(monkeypatch):
    """torch's Muon rounds to bfloat16 before it makes the momentum orthogonal; here it must not, or only three digits could be compared."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


def every(t):
    return [t[name] for name in NAMES]


def muon(t, lr, rest=1e-3, decay=0.0, **given):
    return [
        torch.optim.Muon([t["w"], t["u"]], lr, **{"weight_decay": 0.0, **given}),
        torch.optim.AdamW([t["b"], t["idle"]], rest, (0.9, 0.95), 1e-10, decay),
    ]


CASES = [
    (OptimizerOptions("sgd", 0.1), lambda t: torch.optim.SGD(every(t), 0.1)),
    (OptimizerOptions("sgd", 0.1, weight_decay=0.2), lambda t: torch.optim.SGD(every(t), 0.1, weight_decay=0.2)),
    (OptimizerOptions("momentum", 0.05), lambda t: torch.optim.SGD(every(t), 0.05, momentum=0.9)),
    (
        OptimizerOptions("momentum", 0.05, 0.1, beta=0.7),
        lambda t: torch.optim.SGD(every(t), 0.05, momentum=0.7, weight_decay=0.1),
    ),
    (
        OptimizerOptions("momentum", 0.05, 0.1, nesterov=True),
        lambda t: torch.optim.SGD(every(t), 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    (OptimizerOptions("adam", 0.03), lambda t: torch.optim.Adam(every(t), 0.03)),
    (
        OptimizerOptions("adam", 0.03, 0.1, beta1=0.8, beta2=0.95, eps=1e-6),
        lambda t: torch.optim.Adam(every(t), 0.03, (0.8, 0.95), 1e-6, 0.1),
    ),
    (OptimizerOptions("adamw", 0.03), lambda t: torch.optim.AdamW(every(t), 0.03)),
    (
        OptimizerOptions("adamw", 0.03, 0.1, beta1=0.8, beta2=0.95, eps=1e-6),
        lambda t: torch.optim.AdamW(every(t), 0.03, (0.8, 0.95), 1e-6, 0.1),
    ),
    (OptimizerOptions("adagrad", 0.1), lambda t: torch.optim.Adagrad(every(t), 0.1)),
    (
        OptimizerOptions("adagrad", 0.1, 0.05, eps=1e-3),
        lambda t: torch.optim.Adagrad(every(t), 0.1, weight_decay=0.05, eps=1e-3),
    ),
    (OptimizerOptions("lion", 0.003), lambda t: Lion(every(t), 0.003, (0.9, 0.99), 0.0)),
    (OptimizerOptions("lion", 0.003, 0.2, beta1=0.8, beta2=0.95), lambda t: Lion(every(t), 0.003, (0.8, 0.95), 0.2)),
    (OptimizerOptions("muon", 0.02), lambda t: muon(t, 0.02, 3e-4)),
    (
        OptimizerOptions("muon", 0.05, 0.1, beta=0.8, nesterov=False),
        lambda t: muon(t, 0.05, 3e-4, weight_decay=0.1, momentum=0.8, nesterov=False),
    ),
    (
        OptimizerOptions("muon", 0.02, adjust="match_rms_adamw", adamw_lr=0.01, adamw_weight_decay=0.1),
        lambda t: muon(t, 0.02, 0.01, 0.1, adjust_lr_fn="match_rms_adamw"),
    ),
]


def differ(options, make, train=trained_once):
    """How far losses and weights are from torch's, as a part of the largest."""
    run = train(options)
    losses, weights, _ = torch_trained(make)
    pairs = [(run.losses, losses), *((run.variables[name], weights[name]) for name in weights)]
    return max(np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in pairs)


@pytest.mark.parametrize(("options", "make"), CASES, ids=lambda x: str(getattr(x, "kind", "")))
def test_training_equals_torch(options, make):
    assert differ(options, make) < 1e-9


@pytest.mark.parametrize(
    ("options", "make", "changed"),
    [
        (*CASES[8], {"beta1": 0.95, "beta2": 0.8}),
        *(
            (*CASES[8], change)
            for change in ({"lr": 0.031}, {"weight_decay": 0.11}, {"beta1": 0.81}, {"beta2": 0.951}, {"eps": 1e-5})
        ),
        (*CASES[6], {"kind": "adamw"}),
        (*CASES[10], {"weight_decay": 0.06}),
        (*CASES[12], {"beta1": 0.95, "beta2": 0.8}),
        (*CASES[14], {"nesterov": True}),
        (*CASES[15], {"adamw_lr": 0.011}),
        (*CASES[15], {"adjust": "original"}),
    ],
)
def test_control_every_option_matters(options, make, changed):
    assert differ(replace(options, **changed), make) > 1e-6


def test_control_another_quintic_is_noticed(monkeypatch):
    monkeypatch.setattr(optimizers, "_QUINTIC", (3.4445, -4.7750, 2.0))
    assert differ(*CASES[13], train=trained) > 1e-6


def test_simplifying_changes_nothing():
    weights, batches = data()
    for kind in ("adamw", "lion", "muon"):
        module = updated(OptimizerOptions(kind))
        losses = [run_recurrence(m, weights, batches[:5]).losses for m in (module, simplify(module, SimplifyOptions()))]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)


# ---------------------------------------------------------------------------------------- groups


def test_groups_are_those_of_torch():
    """First match wins: @u is in the first group, though the last one names it, too."""
    options = OptimizerOptions(
        "adamw", 0.03, 0.1, groups=("^u{lr=0.1}", "b|idle{weight_decay=0.0}", "w|u{lr=2.0,weight_decay=0.3}")
    )

    def make(t):
        groups = [
            {"params": [t["w"]], "lr": 0.06, "weight_decay": 0.3},
            {"params": [t["b"], t["idle"]], "weight_decay": 0.0},
            {"params": [t["u"]], "lr": 0.003, "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, 0.03)

    assert differ(options, make) < 1e-9
    assert differ(replace(options, groups=options.groups[1:]), make) > 1e-6


def test_a_group_may_have_an_optimiser_of_its_own():
    """The matrix @u with adamw beside muon, as an embedding would be, and lion for a vector."""
    options = OptimizerOptions(
        "muon", 0.02, adamw_lr=0.005, groups=("^u${kind=adamw,weight_decay=0.1,lr=2.0}", "^b${kind=lion,lr=0.1}")
    )

    def make(t):
        return [
            torch.optim.Muon([t["w"]], 0.02, weight_decay=0.0),
            torch.optim.AdamW([t["u"]], 0.01, (0.9, 0.95), 1e-10, 0.1),
            Lion([t["b"]], 0.002, (0.9, 0.99), 0.0),
        ]

    assert differ(options, make) < 1e-9


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_what_is_no_matrix_in_a_group_with_muon_gets_the_adamw_of_muon(kind):
    """@w and @b are in the group, at twice the rate: the vector has 3e-4 / 0.02 of it, and betas, eps and decay of muon's adamw."""
    options = OptimizerOptions(kind, 0.04, 0.0, groups=("^[wb]${kind=muon,lr=2.0}",))

    def by(rest):
        def make(t):
            plain = (
                torch.optim.SGD([t["u"], t["idle"]], 0.04)
                if kind == "sgd"
                else torch.optim.AdamW([t["u"], t["idle"]], 0.04, weight_decay=0)
            )
            return [torch.optim.Muon([t["w"]], 0.08, weight_decay=0.0), rest(t["b"]), plain]

        return make

    assert differ(options, by(lambda b: torch.optim.AdamW([b], 0.08 * 3e-4 / 0.02, (0.9, 0.95), 1e-10, 0.0))) < 1e-9
    # Controls: the full rate, and the defaults of an adamw on its own.
    assert differ(options, by(lambda b: torch.optim.AdamW([b], 0.08, (0.9, 0.95), 1e-10, 0.0))) > 1e-6
    assert differ(options, by(lambda b: torch.optim.AdamW([b], 0.08 * 3e-4 / 0.02))) > 1e-6


def test_a_group_without_parameters_is_an_error():
    with pytest.raises(UsageError) as caught:
        updated(OptimizerOptions(groups=("nothing{lr=2}", "^w{lr=2}", "w${lr=3}", "^x{frozen=false,weight_decay=1}")))
    text = str(caught.value)
    assert "'nothing' matches no parameter;" in text
    assert "'w$' matches no parameter that the groups before it leave" in text
    assert "'^x' matches no parameter" in text
    assert "'^w' " not in text


# ---------------------------------------------------------------------------------------- the learning rate


def warmed(opt, warmup, after):
    rising = schedulers.LinearLR(opt, 1 / warmup, total_iters=warmup - 1)
    return schedulers.SequentialLR(opt, [rising, after], [warmup])


RATES = [
    ("constant", lambda o: schedulers.ConstantLR(o, 1.0)),
    ("constant{warmup=7}", lambda o: warmed(o, 7, schedulers.ConstantLR(o, 1.0))),
    ("linear{steps=60,end=0.2}", lambda o: schedulers.LinearLR(o, 1.0, 0.2, 60)),
    ("linear{steps=60,warmup=10}", lambda o: warmed(o, 10, schedulers.LinearLR(o, 1.0, 0.0, 50))),
    ("cosine{steps=100}", lambda o: schedulers.CosineAnnealingLR(o, 100)),
    ("cosine{steps=100,warmup=5,end=0.1}", lambda o: warmed(o, 5, schedulers.CosineAnnealingLR(o, 95, 0.1 * 0.05))),
    ("step{every=30}", lambda o: schedulers.StepLR(o, 30)),
    ("step{every=13,factor=0.7,warmup=4}", lambda o: warmed(o, 4, schedulers.StepLR(o, 13, 0.7))),
]


class Scheduled:
    """An optimiser whose rate moves on with each step."""

    def __init__(self, opt, schedule):
        self.opt, self.schedule, self.param_groups = opt, schedule, opt.param_groups

    def step(self):
        self.opt.step()
        self.schedule.step()


@pytest.mark.parametrize(("text", "schedule"), RATES, ids=[text for text, _ in RATES])
def test_rates_are_those_of_torch(text, schedule):
    def make(t):
        opt = torch.optim.SGD([{"params": [t["w"], t["b"], t["idle"]]}, {"params": [t["u"]]}], 0.05, momentum=0.9)
        return Scheduled(opt, schedule(opt))

    options = OptimizerOptions("momentum", 0.05, rate=text)
    assert differ(options, make) < 1e-9
    _, _, expected = torch_trained(make)
    table = parse_rate(text).table()
    np.testing.assert_allclose([0.05 * ramp(table, t) for t in range(STEPS)], expected, rtol=1e-9, atol=1e-17)
    # Control: one step off is another rate, unless it is constant.
    late = [0.05 * ramp(table, t + 1) for t in range(STEPS)]
    assert text == "constant" or np.abs(np.subtract(late, expected)).max() > 1e-4


def ramp(table, step):
    """The operation itself, in the interpreter."""
    ins = (Value("t", TensorType("f64", (ROWS, COLUMNS))), Value("s", TensorType("f64", ())))
    (found,) = apply_op(make("ramp", ins, ["y"]), [np.reshape(table, (ROWS, COLUMNS)), np.array(float(step))])
    return float(found)


def plain(rate, t):
    """Each kind as its documentation has it."""
    if t < rate.warmup:
        return (t + 1) / rate.warmup
    t -= rate.warmup
    match rate:
        case Constant():
            return 1.0
        case Steps():
            return rate.factor ** (t // rate.every)
    done = min(t / (rate.steps - rate.warmup), 1)
    return (
        1 + (rate.end - 1) * done
        if isinstance(rate, Linear)
        else rate.end + (1 - rate.end) * (1 + np.cos(np.pi * done)) / 2
    )


warmups = st.integers(0, 50)
ends = st.floats(0, 2)
rates = st.one_of(
    st.builds(Constant, warmup=warmups),
    st.builds(
        lambda kind, n, w, end: kind(n + w, w, end),
        st.sampled_from([Linear, Cosine]),
        st.integers(1, 200),
        warmups,
        ends,
    ),
    st.builds(Steps, every=st.integers(1, 50), factor=st.floats(0.1, 1.5), warmup=warmups),
)


@settings(max_examples=150, deadline=None)
@given(rates, st.integers(0, 400))
def test_tables_mean_what_the_schedule_says(rate, step):
    assert ramp(rate.table(), step) == pytest.approx(plain(rate, step), rel=1e-12, abs=1e-15)
    assert parse_rate(str(rate)) == rate


# ---------------------------------------------------------------------------------------- what is made


def test_state_and_names():
    module = updated(OptimizerOptions("adamw"))
    state = {name: str(var.type) for name, var in module.vars.items() if var.role == "state"}
    moments = {f"{n}.adam_{s}": str(module.vars[n].type) for n in ("w", "b", "u") for s in "mv"}
    assert state == {**moments, "step": "i64[]", "updates": "i64[]"}
    assert all(module.vars[name].init == "zeros" for name in state)
    update = module.graphs["U"]
    assert not update.ins
    assert not update.outs
    for counter in ("step", "updates"):
        assert [op.var for op in update.ops if op.kind == "write"].count(counter) == 1
    assert sum(op.kind == "pow" for op in update.ops) == 2  # the corrections are computed once, not per parameter
    assert sum(op.kind == "ramp" for op in update.ops) == 1
    names = {v.name for g in (module.graphs["F"], module.graphs["B"]) for op in g.ops for v in op.outs}
    assert not names & {
        v.name for op in update.ops for v in op.outs
    }  # the newest version is another tensor than the microbatch's
    assert print_module(parse_module(print_module(module))) == print_module(module)


def test_steps_and_updates_are_counted():
    variables = trained_once(OptimizerOptions("adamw")).variables
    assert (int(variables["step"]), int(variables["updates"])) == (STEPS, STEPS)
    assert "updates" not in updated(OptimizerOptions("sgd")).vars


@pytest.mark.parametrize("rate", ["constant", "step{every=3}", "cosine{steps=9,warmup=2,end=0.25}"])
def test_the_rate_stands_in_tables_alone(rate):
    """Whatever the rate, the graphs are the same; the text holds the tables, and parses back."""
    one, other = updated(OptimizerOptions("muon")), updated(OptimizerOptions("muon", 0.7, rate=rate))
    assert one.graphs == other.graphs
    text = print_module(other)
    again = parse_module(text)
    assert print_module(again) == text
    assert again.vars[LR].init == (0.7,)
    assert again.vars[CURVE].init == parse_rate(rate).table()
    assert [name for name, var in again.vars.items() if var.role == SETTING] == [LR, CURVE, "lr.factor"]


@pytest.mark.parametrize("kind", ["momentum", "adam", "adagrad", "lion"])
def test_an_update_is_one_kernel_for_each_parameter(kind):
    text = "\n".join(line for line in TEXT.splitlines() if "@idle" not in line)
    calls = training_pipeline(
        {"kind": kind, "weight_decay": 0.1}, {"stages": 1}, PipelineOptions(schedule="1f1b", microbatches=M)
    )
    module = run_passes(parse_module(text), calls, PASSES)
    ops = module.graphs["s0.U"].ops
    for name in (var.name for var in module.vars.values() if var.role == PARAM):
        whole = [
            op
            for op in ops
            if any(v.type == module.vars[name].type for v in op.outs) or op.attrs.get("var", "").startswith(f"{name}.")
        ]
        assert len({op.attrs["kernel"] for op in whole if op.kind != "read"}) == 1


def test_options_are_printed_as_text():
    text = 'optimizer{kind=muon,lr=0.5,nesterov=false,rate="cosine{steps=9,warmup=2}",groups=["a[b,]+{2}{lr=0.5}","^x\\"y{frozen=true}"]}'
    calls = parse_pipeline(f"simplify,{text}", PASSES)
    assert calls[1].options == OptimizerOptions(
        "muon", 0.5, nesterov=False, rate="cosine{steps=9,warmup=2}", groups=("a[b,]+{2}{lr=0.5}", '^x"y{frozen=true}')
    )
    assert print_pipeline(calls) == f"simplify,{text}"


def test_bad_options_are_listed_together():
    module = autodiff(parse_module(TEXT), AutodiffOptions())
    with pytest.raises(UsageError) as caught:
        optimizer(
            module,
            OptimizerOptions(
                "adamw", -1.0, beta1=1.0, rate="cosine{warmup=x}", groups=("w{lr=-1,kind=foo}", "b{frozen=true}")
            ),
        )
    for part in (
        "lr must be 0 or more",
        "beta1",
        "steps is missing",
        "group 'w': lr",
        "got 'foo'",
        "warmup must be a whole number",
    ):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="adamax"):
        optimizer(module, OptimizerOptions("adamax"))
    with pytest.raises(UsageError, match="beta is not known, there are lr, weight_decay"):
        optimizer(module, OptimizerOptions("sgd", beta=0.5))
    with pytest.raises(UsageError, match="group 'b': it is too late to freeze"):
        optimizer(module, OptimizerOptions("sgd", groups=("b{frozen=true}",)))
    with pytest.raises(UsageError, match="already"):
        optimizer(optimizer(module, OptimizerOptions()), OptimizerOptions())
    taken = module.but(vars={**module.vars, "step": module.vars["b"]})
    with pytest.raises(UsageError, match="@step"):
        optimizer(taken, OptimizerOptions("adamw"))


def test_a_table_of_another_size_is_refused():
    module = updated(OptimizerOptions())
    text = print_module(module).replace("init [0.01]", "init [0.01,1.0]")
    with pytest.raises(VerifyError, match=r"@lr: is f64\[\] and begins with 2 elements"):
        check(parse_module(text), ("typed",))
