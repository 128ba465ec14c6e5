"""Every row of the ATen tables against torch: results, element types, and gradients for what is trained; and that the comparison can fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.frontends.torch import calls, import_torch
from penstock.frontends.torch.arrays import array_of
from penstock.frontends.torch.node import Rule
from penstock.frontends.torch.rules import draws
from penstock.frontends.torch.table import RULES
from penstock.support.errors import UnsupportedModel

from ..cases import gradients, judge, labels_of
from .calls import Translated, translate
from .operands import Case, f, i
from .rows import CASES, FLAT, MADE


def check_case(function: Callable[..., Any], operands: tuple[Tensor, ...], trains: bool = True) -> None:
    check_translated(translate([(function, operands)])[0], trains)


def check_translated(found: Translated, trains: bool = True) -> None:
    fed, first = found.call.fed, found.expected[0]
    judge(found.imported, fed, found.expected)
    trains = (
        trains
        and first.dtype == torch.float32
        and first.requires_grad
        and first.numel() > 0
        and bool(first.isfinite().all())
    )
    if not trains:
        return
    ours, loss = gradients(found.imported, fed)
    theirs = torch.nn.functional.mse_loss(first, torch.from_numpy(labels_of(found.imported.module)))
    given = torch.autograd.grad(theirs, list(found.params.values()), retain_graph=True, allow_unused=True)
    assert abs(loss - theirs.item()) <= 1e-4 * max(1.0, abs(loss))
    for (name, param), slope in zip(found.params.items(), given, strict=True):
        want = np.zeros(param.shape, np.float32) if slope is None else array_of(slope)
        got = ours.get(name, np.zeros(param.shape))
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=2e-5, err_msg=name)


# Exported together; those whose results are computed at import unless they are large by themselves.
TOGETHER = 128
GROUPS = [
    group[at : at + TOGETHER]
    for made in (False, True)
    for group in [[i for i, (row, _, _) in enumerate(CASES) if (row in MADE) == made]]
    for at in range(0, len(group), TOGETHER)
]


def translate_cases(indices: Sequence[int]) -> dict[int, Translated]:
    with pytest.MonkeyPatch.context() as patch:
        if CASES[indices[0]][0] in MADE:
            patch.setattr(calls, "LARGEST", 0)
        return dict(zip(indices, translate([CASES[i][1:] for i in indices]), strict=True))


@functools.cache
def translated_group(number: int) -> dict[int, Translated]:
    """The cases of a group; none where they cannot be imported together: each is imported alone then, and the one at fault fails."""
    try:
        return translate_cases(GROUPS[number])
    except Exception:
        return {}


def _name(case: Case) -> str:
    return f"{case[0]}-{'-'.join('x'.join(map(str, x.shape)) or '0' for x in case[2])}"


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(_name, CASES))
def test_row(index: int) -> None:
    row = CASES[index][0]
    group = next(number for number, indices in enumerate(GROUPS) if index in indices)
    found = translated_group(group).get(index) or translate_cases([index])[index]
    check_translated(found, trains=row not in FLAT)
    assert row in found.asked, f"the rule of {row} was not asked, but those of {sorted(found.asked)}"


def test_a_fault_in_a_program_of_several_calls_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: in one program, the wrong rule's results alone are wrong, and its row alone is asked there."""
    monkeypatch.setattr(
        calls, "ALL_RULES", {**RULES, "tanh": lambda n: n.emit("mul", n.emit("tanh", n.value()), 1.001)}
    )
    right, wrong, also_right = translate(
        [(torch.sigmoid, (f(3),)), (torch.tanh, (f(3),)), (torch.add, (f(2, 3), i(0, 5, 3)))]
    )
    check_translated(right)
    check_translated(also_right)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_translated(wrong)
    assert (right.asked, wrong.asked, also_right.asked) == ({"sigmoid"}, {"tanh"}, {"add.Tensor"})


def test_every_row_has_a_case() -> None:
    missing = set(RULES) - {row for row, _, _ in CASES}
    # Of programs with symbolic sizes (../test_source.py), and of random numbers (formulas/test_draws.py).
    assert missing - set(draws.RULES) == {"sym_size.int"}


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("tanh", lambda n: n.emit("mul", n.emit("tanh", n.value()), 1.001)),
        ("tanh", lambda n: n.emit("cast", n.emit("tanh", n.value()), dtype="f64")),
    ],
)
def test_a_wrong_rule_is_noticed(row: str, wrong: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ALL_RULES", {**RULES, row: wrong})
    with pytest.raises((AssertionError, UnsupportedModel), match=r"Not equal to tolerance|comes out as f64"):
        check_case(torch.tanh, (f(3),))


def test_an_argument_that_no_rule_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ALL_RULES", {**RULES, "gelu": lambda n: n.emit("gelu", n.value())})
    with pytest.raises(UnsupportedModel, match="argument approximate is not supported"):
        check_case(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), (f(3),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_element_types(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU()).to(dtype)
    x = f(2, 3).to(dtype)
    judge(
        import_torch(layer, (x,)),
        x,
        [layer(x)],
        {torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype],
    )


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
