"""Every gradient rule on random shapes, with broadcasting, in float64: against finite differences of the interpreter and against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from samples import samples_of

from penstock.ir.graph import Op, Var
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.ops import OPS
from penstock.ir.types import FLOATS
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.passes.training.vjp import FLAT, STOPS, VJP
from penstock.passes.training.vjp.emitter import scaled
from penstock.support.errors import UnsupportedModel

from ..autodiff_cases import THE_OP, gradients, of_one_op, reference
from .drawn_gradients import DRAWN, Drawn

STEP, CLOSE = 2e-3, 1e-6
Check = Callable[[str, Drawn], None]


def set_up(kind: str, drawn: Drawn) -> tuple[object, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The operation in a module whose loss is a weighted sum of all its results, its operands and weights, and our gradients."""
    module = of_one_op(kind, drawn.arrays, drawn.attrs, drawn.outs, read=drawn.read)
    r = np.random.default_rng(7)
    weights = {v.name: r.normal(size=v.type.shape) for v in module.inputs if v.name.endswith(".weight")}
    arrays = {f"x{i}": x for i, x in enumerate(drawn.arrays)} | weights
    return module, arrays, gradients(module, arrays)[0]


def equals_torch(kind: str, drawn: Drawn) -> None:
    _, arrays, found = set_up(kind, drawn)
    expected = reference(drawn.function, drawn.arrays, [x for name, x in arrays.items() if name.endswith(".weight")])
    assert set(found) == set(expected)
    for name, grad in found.items():
        scale = np.abs(expected[name]).max(initial=0.0)
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=CLOSE * scale + 1e-12, err_msg=f"{drawn} {name}")


def equals_differences(kind: str, drawn: Drawn) -> None:
    """Along single elements and along a random direction: five points, an error of the fourth power of the step."""
    module, arrays, found = set_up(kind, drawn)
    main = module.graphs["main"]

    def loss(**changed: np.ndarray) -> float:
        values = {**arrays, **changed}
        store = DictStore({name: values[name] for name in module.vars})
        return float(run_graph(main, {v.name: values[v.name] for v in main.ins}, store, "f64")[0])

    r = np.random.default_rng(9)
    assert set(found) == set(module.vars)
    for name, grad in found.items():
        x = arrays[name]
        picked = r.permutation(x.size)[:5]
        directions = [np.eye(1, x.size, i).reshape(x.shape) for i in picked] + [r.uniform(-1, 1, x.shape)]
        for u in directions:
            far, near = (loss(**{name: x + n * STEP * u}) - loss(**{name: x - n * STEP * u}) for n in (2, 1))
            slope = (8 * near - far) / (12 * STEP)
            limit = CLOSE * np.abs(grad).max(initial=0.0) * np.abs(u).sum() + 1e-8
            assert abs(slope - float((grad * u).sum())) <= limit, f"{drawn} {name}: {slope} against {(grad * u).sum()}"


def hold(kind: str, check: Check, examples: int) -> None:
    """Check a rule on that many random cases, always the same."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.generate],
    )
    @given(DRAWN[kind])
    def law(drawn: Drawn) -> None:
        check(kind, drawn)

    law()


CHECKS = {"torch": equals_torch, "differences": equals_differences}


@pytest.mark.parametrize("judge", CHECKS)
@pytest.mark.parametrize("kind", sorted(VJP))
def test_gradient_of_random_shapes(kind: str, judge: str) -> None:
    hold(kind, CHECKS[judge], 20)


@pytest.mark.slow
@pytest.mark.parametrize("judge", CHECKS)
@pytest.mark.parametrize("kind", sorted(VJP))
def test_gradient_of_more_random_shapes(kind: str, judge: str) -> None:
    hold(kind, CHECKS[judge], 60)


@pytest.mark.parametrize("judge", CHECKS)
@pytest.mark.parametrize("kind", sorted(VJP))
def test_control_a_wrong_sign_is_noticed(kind: str, judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VJP[kind]

    def wrong(b, op, *grads):  # type: ignore[no-untyped-def]
        sign = -1.0 if op.loc == THE_OP else 1.0  # of sum and mul the loss is made, too
        return [None if rule is None else lambda rule=rule: scaled(b, sign, rule()) for rule in right(b, op, *grads)]

    monkeypatch.setitem(VJP, kind, wrong)
    with pytest.raises(AssertionError):
        hold(kind, CHECKS[judge], 8)


@pytest.mark.parametrize(
    "kind", ["add", "sub", "mul", "div", "pow", "rem", "minimum", "maximum", "where", "matmul", "broadcast"]
)
def test_the_shapes_do_broadcast(kind: str) -> None:
    """Among the cases are operands with fewer dimensions than the result, and with a 1 where the result has more."""
    seen = set()

    def look(kind: str, drawn: Drawn) -> None:
        result = drawn.function(*(torch.tensor(x) for x in drawn.arrays))
        for x in drawn.arrays:
            shape, own = list(result.shape), list(x.shape)
            if kind == "matmul":
                shape, own = shape[:-2], own[:-2]
            seen.add("fewer" if len(own) < len(shape) else "equal")
            if any(a == 1 < b for a, b in zip(own[::-1], shape[::-1], strict=False)):
                seen.add("one")

    hold(kind, look, 25)
    assert seen == {"fewer", "equal", "one"}


# ---------------------------------------------------------------------------------------- no row is left out


def differentiable() -> Iterator[str]:
    """Rows with a sample that makes floats of floats. Not gradients themselves, of which there are first ones only, nor what changes variables."""
    for kind, row in OPS.items():
        second = "_grad" in kind and kind not in VJP
        if second or row.effect or row.family == "optimizer":
            continue
        ops = [s.op for s in samples_of(kind)]
        if any(
            any(v.type.dtype in FLOATS for v in op.ins) and any(v.type.dtype in FLOATS for v in op.outs) for op in ops
        ):
            yield kind


# A float has nothing to do with the bits of another one: a loss behind it is refused.
REFUSED = ("bitcast",)
# So is one behind weights of whole numbers, which are not trained.
OF_NUMBERS = ("matmul_q", "gather_q")
# Caches are of generation alone.
OF_CACHES = ("attend",)


def left_out(rows: Collection[str], rules: Collection[str], cases: Collection[str]) -> list[str]:
    """Rows without a rule that are not flat or an end of gradients by name, and rules without random cases."""
    ends = {*STOPS, *FLAT, *REFUSED, *OF_NUMBERS, *OF_CACHES}
    return [f"{kind} has no rule" for kind in rows if kind not in rules and kind not in ends] + [
        f"{kind} has no cases" for kind in rules if kind not in cases
    ]


def test_every_row_of_floats_has_a_rule_and_cases() -> None:
    rows = list(differentiable())
    assert {"add", "matmul", "conv", "softmax", "gather", "floor", "detach"} <= set(rows)
    assert left_out(rows, VJP, DRAWN) == []
    assert set(VJP) <= set(rows), "a rule for what makes no floats of floats"
    assert left_out(rows, [kind for kind in VJP if kind != "erf"], DRAWN) == ["erf has no rule"]
    assert left_out(rows, VJP, [kind for kind in DRAWN if kind != "gather"]) == ["gather has no cases"]


def test_a_weight_of_whole_numbers_is_refused() -> None:
    weight = (np.ones((4, 32), np.int8), np.ones((4, 1), np.float32))
    module = of_one_op("matmul_q", (np.ones((3, 32), np.float32), *weight), {"bits": 8, "group": 32})
    main = module.graphs["main"]
    x, *ins = main.ins
    read = Op("read", (), (x,), {"var": x.name})
    trained = module.but(inputs=tuple(ins), vars={x.name: Var(x.name, x.type, "param")})
    with pytest.raises(UnsupportedModel, match=r"matmul_q %y0 .* has no gradient rule"):
        autodiff(trained.with_graph(replace(main, ins=tuple(ins), ops=(read, *main.ops))), AutodiffOptions())


@pytest.mark.parametrize("kind", [*REFUSED, "floor", "round", "sign"])
def test_what_has_no_gradient_is_refused(kind: str) -> None:
    attrs = {"dtype": "f64"} if kind == "bitcast" else {}
    with pytest.raises(UnsupportedModel, match=rf"{kind} %y0 \({THE_OP}\)"):
        autodiff(of_one_op(kind, (np.ones(3),), attrs), AutodiffOptions())
