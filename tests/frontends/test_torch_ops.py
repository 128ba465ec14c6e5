"""Every row of the ATen tables against torch: results, element types, and gradients for what is trained; and that the comparison can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.frontends.torch import calls, draws, import_torch
from penstock.frontends.torch.arrays import array_of
from penstock.frontends.torch.node import Node, Rule
from penstock.frontends.torch.table import RULES
from penstock.ir.errors import UnsupportedModel

from .torch_cases import gradients, judge, labels_of, tensors
from .torch_operands import Case, f
from .torch_rows import CASES, FLAT, MADE


class Call(nn.Module):
    """A call whose floating-point operands are parameters, so that nothing of it is computed at import."""

    def __init__(self, function: Callable[..., Any], operands: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function = function
        self.places = [x.is_floating_point() for x in operands]
        self.params = nn.ParameterList([nn.Parameter(x.clone()) for x in operands if x.is_floating_point()])

    def forward(self, *rest: Tensor) -> Any:
        trained, fed = iter(self.params), iter(rest)
        return self.function(*(next(trained) if place else next(fed) for place in self.places))


def check_case(function: Callable[..., Any], operands: tuple[Tensor, ...], trains: bool = True) -> None:
    module = Call(function, operands)
    fed = tuple(x for x in operands if not x.is_floating_point())
    imported = import_torch(module, fed)
    expected = tensors(module(*fed))
    judge(imported, fed, expected)
    first = expected[0]
    trains = trains and first.dtype == torch.float32 and first.requires_grad and first.numel() > 0 and bool(first.isfinite().all())
    if not trains:
        return
    found, loss = gradients(imported, fed)
    theirs = torch.nn.functional.mse_loss(first, torch.from_numpy(labels_of(imported.module)))
    theirs.backward()
    assert abs(loss - theirs.item()) <= 1e-4 * max(1.0, abs(loss))
    for name, param in module.named_parameters():
        want = np.zeros(param.shape, np.float32) if param.grad is None else array_of(param.grad)
        got = found.get(name, np.zeros(param.shape))
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=2e-5, err_msg=name)


def _name(case: Case) -> str:
    return f"{case[0]}-{'-'.join('x'.join(map(str, x.shape)) or '0' for x in case[2])}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_row(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    row, function, operands = case
    used: set[str] = set()

    def noting(name: str, rule: Rule) -> Rule:
        def noted(n: Node) -> Any:
            used.add(name)
            return rule(n)

        return noted

    monkeypatch.setattr(calls, "RULES", {name: noting(name, rule) for name, rule in RULES.items()})
    if row in MADE:
        monkeypatch.setattr(calls, "LARGEST", 0)
    check_case(function, operands, trains=row not in FLAT)
    assert row in used, f"the rule of {row} was not asked, but those of {sorted(used)}"


def test_every_row_has_a_case() -> None:
    missing = set(RULES) - {row for row, _, _ in CASES}
    # Of programs with symbolic sizes (test_torch_sources.py), and of random numbers (test_random.py).
    assert missing - set(draws.RULES) == {"sym_size.int"}


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("tanh", lambda n: n.emit("mul", n.emit("tanh", n.value()), 1.001)),
        ("tanh", lambda n: n.emit("cast", n.emit("tanh", n.value()), dtype="f64")),
    ],
)
def test_a_wrong_rule_is_noticed(row: str, wrong: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RULES", {**RULES, row: wrong})
    with pytest.raises((AssertionError, UnsupportedModel), match=r"Not equal to tolerance|comes out as f64"):
        check_case(torch.tanh, (f(3),))


def test_an_argument_that_no_rule_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RULES", {**RULES, "gelu": lambda n: n.emit("gelu", n.value())})
    with pytest.raises(UnsupportedModel, match="argument approximate is not supported"):
        check_case(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), (f(3),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_element_types(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU()).to(dtype)
    x = f(2, 3).to(dtype)
    judge(import_torch(layer, (x,)), x, [layer(x)], {torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype])


def test_transforms_to_complex_numbers_are_refused_by_that_reason() -> None:
    with pytest.raises(UnsupportedModel, match=r"_fft_r2c.*there are no complex numbers here"):
        check_case(lambda x: torch.fft.irfft(torch.fft.rfft(x)), (f(2, 8),))
    with pytest.raises(UnsupportedModel, match=r"aten.complex.*there are no complex numbers here"):
        check_case(lambda x: torch.fft.irfft(torch.complex(x, x)), (f(2, 5),))
    with pytest.raises(UnsupportedModel, match="no rule for this operation"):
        check_case(torch.special.bessel_j0, (f(3),))


def test_an_element_type_without_a_counterpart_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="input input: element type complex64 is not supported"):
        import_torch(nn.Identity(), (torch.zeros(3, dtype=torch.complex64),))
