"""Elementary functions in f32 against NumPy in float64, over all kinds of operands, for three instruction sets; and what would be noticed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.tvm.kernels.tools import powers, trigonometry
from penstock.backends.tvm.run.load import TvmProgram

from ...cases import OpCase, build

# Whole vectors, and something left over behind the last one.
COUNT = 4096 + 13
TARGETS = ("host", "portable", "x86-64")
FUNCTIONS = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": lambda x: torch.erf(torch.from_numpy(x)).numpy(),
    "pow": np.power,
}
# Largest error in units in the last place of the exact result, which is rounded to f32 for them.
ULPS = {
    "exp": 1.3,
    "log": 1.3,
    "sqrt": 0.6,
    "rsqrt": 1.5,
    "sin": 2,
    "cos": 2,
    "tanh": 6,
    "sigmoid": 4,
    "erf": 8,
    "pow": 1.5,
}
# What they are multiples of below this size: eigen's erf of denormals is 0 where it should be one, and 1 + exp(-x) gives no denormals.
LEAST = {"erf": 1e-30, "sigmoid": 1e-30}
SMALL = [0.0, 1e-45, 1e-40, 1.1754944e-38, 1e-30, 0.5, 0.99999994, 1, 1.0000001, 1.5, 2, 3, 4, 9]
LARGE = [
    87.4,
    88.7,
    88.73,
    103.9,
    104.5,
    131072,
    131073,
    16777215,
    16777216,
    16777217,
    1e10,
    1e30,
    3.4e38,
    math.inf,
    math.nan,
]
SPECIAL = np.array([*SMALL, *LARGE], np.float32)
SIGNED = np.concatenate([SPECIAL, -SPECIAL])


def _bits(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2**32, COUNT, dtype=np.uint32).view(np.float32)


def operands(kind: str) -> dict[str, tuple[np.ndarray, ...]]:
    """Operands by what is hard about them."""
    rng = np.random.default_rng(5)
    if kind == "pow":
        pairs = np.meshgrid(SIGNED, SIGNED)
        powers_of_two = np.exp2(rng.uniform(-140, 127, COUNT))
        drawn = {
            "special": tuple(np.resize(a.ravel(), COUNT) for a in pairs),
            "any": (_bits(rng), _bits(rng)),
            "usual": (np.abs(rng.standard_normal(COUNT)) + 0.1, rng.standard_normal(COUNT)),
            "whole": (rng.standard_normal(COUNT) * 3, rng.integers(-20, 20, COUNT)),
            "near one": (1 + rng.standard_normal(COUNT) * 1e-4, rng.uniform(-9e5, 9e5, COUNT)),
            "all sizes": (powers_of_two, rng.uniform(-1.2, 1.2, COUNT)),
            "small results": (rng.uniform(0, 1, COUNT), rng.uniform(80, 110, COUNT)),
        }
    else:
        drawn = {
            "special": (np.resize(SIGNED, COUNT),),
            "any": (_bits(rng),),
            "usual": (rng.standard_normal(COUNT) * 4,),
            "near one": (1 + rng.standard_normal(COUNT) * 1e-3,),
            "denormal": (
                (
                    rng.integers(0, 2**23, COUNT).astype(np.uint32)
                    | (rng.integers(0, 2, COUNT).astype(np.uint32) << 31)
                ).view(np.float32),
            ),
            "small results": (-rng.uniform(80, 105, COUNT),),
            "large": (rng.uniform(-131072, 131072, COUNT),),
            "near zeros": (np.rint(rng.uniform(-80000, 80000, COUNT)) * (np.pi / 2),),
        }
    return {what: tuple(a.astype(np.float32) for a in arrays) for what, arrays in drawn.items()}


def problem(kind: str, found: np.ndarray, arrays: tuple[np.ndarray, ...]) -> str:
    """What is wrong about results, or nothing."""
    with np.errstate(all="ignore"):
        exact = np.asarray(FUNCTIONS[kind](*(a.astype(np.float64) for a in arrays)))
        rounded = exact.astype(np.float32)
    for what, test in (("nan", np.isnan), ("inf", np.isinf)):
        if not np.array_equal(test(found), test(rounded)):
            return f"{what} in different places, as for {[a[test(found) != test(rounded)][:3] for a in arrays]}"
    least = np.float32(LEAST.get(kind, 0))
    signs = (np.signbit(found) != np.signbit(rounded)) & ~np.isnan(rounded) & (np.abs(rounded) >= least)
    if signs.any():
        return f"another sign, as for {[a[signs][:3] for a in arrays]}"
    finite = np.isfinite(rounded)
    unit = np.spacing(np.maximum(np.abs(rounded[finite]), max(least, np.float32(1e-45))))
    error = np.abs(found[finite].astype(np.float64) - exact[finite]) / unit
    if error.max(initial=0) > ULPS[kind]:
        return f"error of {error.max():.3g} ulp for {[a[finite][error.argmax()] for a in arrays]}"
    return ""


def program_of(kinds: list[str], folder: Path, target: str = "host") -> TvmProgram:
    graphs = [OpCase(k, (f"f32[{COUNT}]",) * (2 if k == "pow" else 1), {}).graph(f"s0.{k}") for k in kinds]
    return build(graphs, folder, target)


def call(program: TvmProgram, kind: str, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    (found,) = program.call(f"s0.{kind}", [torch.tensor(a) for a in arrays])
    return found.numpy()


@pytest.fixture(scope="module", params=TARGETS)
def functions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TvmProgram:
    return program_of(sorted(FUNCTIONS), tmp_path_factory.mktemp("functions"), request.param)


@pytest.mark.parametrize("kind", sorted(FUNCTIONS))
def test_vector_functions_are_accurate_and_right_at_the_ends(kind: str, functions: TvmProgram) -> None:
    found = {what: problem(kind, call(functions, kind, arrays), arrays) for what, arrays in operands(kind).items()}
    assert not {what: text for what, text in found.items() if text}


@pytest.fixture(scope="module")
def powers_here(tmp_path_factory: pytest.TempPathFactory) -> TvmProgram:
    return program_of(["pow"], tmp_path_factory.mktemp("powers"))


FLOATS = st.floats(width=32)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(FLOATS, FLOATS | st.integers(-300, 300).map(float)), min_size=1, max_size=64))
def test_powers_of_anything(pairs: list[tuple[float, float]], powers_here: TvmProgram) -> None:
    x, y = (np.resize(np.array(a, np.float32), COUNT) for a in zip(*pairs, strict=True))
    assert not problem("pow", call(powers_here, "pow", (x, y)), (x, y))


def test_roots_of_squares_are_exact(functions: TvmProgram) -> None:
    roots = np.arange(COUNT, dtype=np.float32)
    assert np.array_equal(call(functions, "sqrt", (roots * roots,)), roots)


def test_control_a_poor_coefficient_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigonometry, "_SIN", tuple(c * (1 + 2e-5) for c in trigonometry._SIN))
    monkeypatch.setattr(powers, "_LOG2", tuple(c * (1 + 1e-7) for c in powers._LOG2))
    program = program_of(["sin", "pow"], tmp_path)
    for kind in ("sin", "pow"):
        arrays = operands(kind)["usual"]
        assert "ulp" in problem(kind, call(program, kind, arrays), arrays)


def test_control_operands_beyond_the_limit_need_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigonometry, "_LARGEST", math.inf)
    arrays = operands("cos")["any"]
    assert problem("cos", call(program_of(["cos"], tmp_path), "cos", arrays), arrays)


def test_control_pi_in_two_parts_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigonometry, "_PI", trigonometry._PI[:2])
    arrays = operands("sin")["near zeros"]
    assert "ulp" in problem("sin", call(program_of(["sin"], tmp_path), "sin", arrays), arrays)
