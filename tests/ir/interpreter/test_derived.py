"""Variables that are computed from those of the model: sizes of nothing, and types that do not fit their form."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ir.graph import Var
from penstock.ir.interpreter.derived import derive
from penstock.ir.types import parse_type
from penstock.support.errors import VerifyError


def made(type: str, form: str, *dims: int) -> np.ndarray:
    return derive(Var("q", parse_type(type), "param", source="w", form=form), np.ones(dims, np.float32))


@pytest.mark.parametrize(
    ("type", "form", "dims"),
    [
        ("bf16[0,8]", "bf16", (0, 8)),
        ("bf16[8,0]", "bf16", (8, 0)),
        ("bf16[]", "bf16", ()),
        ("bf16[5]", "bf16", (5,)),
        ("bf16[2,3,4]", "bf16", (2, 3, 4)),
        ("i8[0,8]", "codes8.4", (0, 8)),
        ("f16[0,2]", "scales4.4", (0, 8)),
        ("u8[8,0]", "codes4.4.turned", (0, 8)),
        ("f16[6,2]", "scales8.4.turned", (8, 6)),
    ],
)
def test_types_that_fit_are_computed(type: str, form: str, dims: tuple[int, ...]) -> None:
    assert made(type, form, *dims).shape == parse_type(type).dims


@pytest.mark.parametrize(
    ("type", "form", "dims", "words"),
    [
        ("bf16[8,4]", "bf16", (4, 8), r"is bf16\[8,4\], and bf16 of @w of dimensions \[4, 8\] is bf16\[4,8\]"),
        ("i8[8,6]", "codes8.4", (6, 8), r"is i8\[8,6\], and codes8.4 of @w .* is i8\[6,8\]"),
        ("i8[6,8]", "codes8.4.turned", (6, 8), "rows are no whole groups"),
        ("u8[6,8]", "codes8.4", (6, 8), r"is u8\[6,8\], and .* is i8\[6,8\]"),
        ("f16[6,4]", "scales8.4", (6, 8), r"is f16\[6,4\], and .* is f16\[6,2\]"),
        ("u8[6,8]", "codes4.4", (6, 8), r"is u8\[6,8\], and .* is u8\[6,4\]"),
        ("u8[6,3]", "codes4.7", (6, 7), "rows are no whole groups and bytes"),
        ("i8[6,8]", "codes8.0", (6, 8), "rows are no whole groups"),
        ("i8[8]", "codes8.4", (8,), "only matrices are rounded in groups"),
    ],
)
def test_types_that_do_not_fit_are_named(type: str, form: str, dims: tuple[int, ...], words: str) -> None:
    with pytest.raises(VerifyError, match=f"@q: .*{words}"):
        made(type, form, *dims)
