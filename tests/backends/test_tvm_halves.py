"""Kernels on 16-bit floats: every row of the op table in bf16 and f16 against the interpreter in float64.

The bound: operands are taken as they are, arithmetic is that of f32, and each result is rounded once, so an element may be off by

    u * |exact| + what f32 kernels are allowed (a part of the largest element),      u = 2^-8 for bf16, 2^-11 for f16

and, for f16, by half of its smallest number. Sums that were kept in 16 bits break this bound; a control makes sure of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from test_tvm_ops import CASES
from tvm_cases import TOLERANCE, OpCase, build, make_args, random_array, tensors_of, value

from penstock.backends.tvm.kernels.emit import Emitter
from penstock.ir.graph import Graph, Op, signature
from penstock.ir.interp import F64, run_graph
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, numpy_dtype, parse_type

HALVES = ("bf16", "f16")
ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11}
SMALLEST = {"bf16": 2.0**-133, "f16": 2.0**-24}
# What goes past 65504 in f16 is not wrong, but says nothing either.
TOO_LARGE = {"f16": {"pow"}, "bf16": set()}


def in_half(case: OpCase, half: str) -> OpCase | None:
    """A case of f32 in 16 bits; None for the others."""
    types = tuple(t.replace("f32", half) for t in case.types)
    attrs = {k: half if v == "f32" else v for k, v in case.attrs.items()}
    return replace(case, types=types, attrs=attrs) if (types, attrs) != (case.types, dict(case.attrs)) else None


def widened(x: torch.Tensor | np.ndarray) -> np.ndarray:
    return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x).astype(np.float64)


def excess(found: np.ndarray, exact: np.ndarray, half: str) -> float:
    """The error as a part of what is allowed."""
    if not np.array_equal(np.isnan(found), np.isnan(exact)):
        return float("inf")
    finite = np.isfinite(exact) & np.isfinite(found)
    limit = ROUNDOFF[half] * np.abs(exact) + TOLERANCE["f32"] * np.abs(exact[finite]).max(initial=0.0) + SMALLEST[half] / 2
    # Past the largest number results are infinite.
    largest = float(ml_dtypes.finfo(numpy_dtype(half)).max)
    overflown = np.isinf(found) & ~np.isinf(exact) & (np.abs(exact) > largest * (1 - ROUNDOFF[half]))
    if not np.array_equal(np.isinf(found) & ~overflown, np.isinf(exact) & np.isinf(found)):
        return float("inf")
    return float((np.abs(found - exact)[finite] / limit[finite]).max(initial=0.0))


def problems(program, graph: Graph, arrays: Sequence[np.ndarray], half: str) -> list[str]:
    results = signature(graph).results
    found = program.call(graph.name, tensors_of(signature(graph), arrays, shared=False))
    exact = run_graph(graph, arrays, precision=F64)
    wrong = []
    for v, a, b in zip(results, found, exact, strict=True):
        if v.type.dtype in HALVES:
            off = excess(widened(a), b, half)
            wrong += [f"%{v.name} is {off:.2f} times as far off as it may be"] if off > 1 else []
        elif v.type.dtype in FLOATS:
            scale = np.abs(b).max(initial=1e-30)
            wrong += [f"%{v.name} differs"] if np.abs(widened(a) - b).max(initial=0.0) > TOLERANCE[v.type.dtype] * scale else []
        else:
            wrong += [f"%{v.name} differs"] if not np.array_equal(a.numpy(), b) else []
    return wrong


@pytest.fixture(scope="module", params=HALVES)
def half(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(half: str) -> list[tuple[OpCase, Graph]]:
    found = [c for c in (in_half(c, half) for c in CASES) if c is not None and c.kind not in TOO_LARGE[half]]
    return [(c, c.graph(f"s0.c{i}")) for i, c in enumerate(found)]


@pytest.fixture(scope="module")
def program(cases, tmp_path_factory: pytest.TempPathFactory):
    return build([g for _, g in cases], tmp_path_factory.mktemp("halves"))


def test_every_operation_is_within_one_rounding_of_the_exact_result(half: str, cases, program) -> None:
    rng = np.random.default_rng(1)
    wrong = []
    for c, graph in cases:
        wrong += [f"{c}: {w}" for w in problems(program, graph, make_args(graph, rng, c.positive), half)]
    assert not wrong, "\n".join(wrong)
