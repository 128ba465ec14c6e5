"""Convolutions on tile registers: as exact as float32 whatever the sizes and the numbers are. Skipped where the processor has none.

The oracle is torch in float64. The bound is the one of products in tiles/test_product.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.kernels.conv import tile_conv
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of
from penstock.backends.tvm.tile_permission import allow_tiles

from ...cases import ConvCase, build

pytestmark = pytest.mark.skipif(not allow_tiles(), reason="this machine has no tile registers")

U = 2.0**-24


CASES = {
    "whole": ConvCase((1, 64, 24, 32), (64, 64, 3, 3), pads=(1, 1, 1, 1)),
    "narrow": ConvCase((3, 70, 7, 7), (82, 70, 3, 3), pads=(1, 1, 1, 1)),
    "bands": ConvCase((1, 160, 53, 50), (48, 160, 3, 3), pads=(1, 1, 1, 1)),
    "wide": ConvCase((1, 40, 3, 700), (50, 40, 2, 3), pads=(1, 0, 0, 2)),
    "stride two": ConvCase((2, 64, 29, 43), (48, 64, 3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "strides": ConvCase((2, 64, 29, 30), (64, 64, 3, 5), strides=(1, 3), pads=(0, 2, 1, 0)),
    "dilations": ConvCase((2, 48, 30, 27), (64, 48, 3, 3), pads=(2, 3, 2, 3), dilations=(2, 3)),
    "both": ConvCase((1, 64, 40, 40), (64, 64, 3, 3), strides=(2, 3), pads=(1, 0, 2, 1), dilations=(3, 2)),
    "groups": ConvCase((2, 128, 20, 20), (192, 64, 3, 3), groups=2, pads=(1, 1, 1, 1)),
    "one tap": ConvCase((2, 96, 28, 29), (80, 96, 1, 1)),
    "one tap, small": ConvCase((3, 70, 7, 7), (50, 70, 1, 1)),
    "one tap, stride two": ConvCase((2, 64, 29, 43), (80, 64, 1, 1), strides=(2, 2)),
    "one tap, stride three, groups": ConvCase((1, 128, 31, 100), (64, 64, 1, 1), strides=(3, 3), groups=2),
    "one tap, border": ConvCase((1, 64, 20, 20), (64, 64, 1, 1), pads=(1, 0, 2, 1)),
    "few positions": ConvCase((1, 70, 7, 7), (50, 70, 3, 3), pads=(1, 1, 1, 1)),
    "few positions, stride two": ConvCase((1, 64, 13, 13), (40, 64, 3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "few positions, one tap": ConvCase((1, 96, 7, 6), (40, 96, 1, 1)),
    "few positions, bf16": ConvCase((1, 70, 7, 7), (50, 70, 3, 3), pads=(1, 1, 1, 1), dtype="bf16"),
    "one dimension": ConvCase((2, 64, 150), (80, 64, 4), strides=(1,), pads=(1, 2), dilations=(1,)),
    "bf16": ConvCase((2, 64, 29, 31), (96, 64, 3, 3), pads=(1, 1, 1, 1), dtype="bf16"),
}
GRAPHS = {
    (n, g): c.graph(f"s0.{'d' if g else 'f'}_{n.replace(' ', '_').replace(',', '')}", g)
    for n, c in CASES.items()
    for g in (False, True)
}
FAST = ("whole", "narrow", "stride two", "dilations", "one tap", "one tap, stride two", "few positions")


@pytest.fixture(scope="module", autouse=True)
def always_on_tiles():
    """Small convolutions are left to the vector units otherwise. Other processes, and the cache, know nothing of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_conv, "_VECTORS_RATE", 1e-3)
        patch.setenv("PENSTOCK_CACHE", "off")
        yield


class Programs(dict[tuple[str, bool], TvmProgram]):
    """Compiled when they are first asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self.folders = folders

    def __missing__(self, key: tuple[str, bool]) -> TvmProgram:
        self[key] = build([GRAPHS[key]], self.folders.mktemp("conv"))
        return self[key]


@pytest.fixture(scope="module")
def programs(always_on_tiles: None, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory)


def operands(name: str, gradient: bool, drawn) -> list[torch.Tensor]:
    rng = np.random.default_rng(1)
    shapes = [v.type.dims for v in GRAPHS[name, gradient].ins]
    tensors = [torch.tensor(drawn(rng, shape).astype(np.float32)) for shape in shapes]
    return [t.bfloat16() for t in tensors] if CASES[name].dtype == "bf16" else tensors


def excess(name: str, gradient: bool, found: torch.Tensor, ins: list[torch.Tensor]) -> float:
    """The largest error in units of what may be off: every product and every addition of a sum by half a unit in the last place, twice over."""
    case = CASES[name]
    run = case.backward if gradient else case.forward
    exact, magnitudes = run(*(t.double() for t in ins)), run(*(t.double().abs() for t in ins))
    length = case.w[1] * np.prod(case.w[2:]) if not gradient else case.w[0] // case.groups * np.prod(case.w[2:])
    bound = 2 * U * (2 + np.sqrt(length)) * magnitudes
    if case.dtype == "bf16":
        bound = bound + 2.0**-8 * exact.abs()
    wrong = (found.double() - exact).abs()
    assert torch.all(wrong[magnitudes == 0] == 0)
    return float((wrong / bound)[magnitudes > 0].max())


DRAWN = {
    "around zero": lambda rng, shape: rng.standard_normal(shape),
    "of many magnitudes": lambda rng, shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape),
    # The first part is 1, the second 2**-9, the third positive.
    "third parts agree": lambda rng, shape: 1 + 2.0**-9 + rng.integers(38, 60, shape) * 2.0**-23,
}


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", CASES)
def test_convolutions_are_as_exact_as_float32(name: str, gradient: bool, drawn: str, programs: Programs) -> None:
    ins = operands(name, gradient, DRAWN[drawn])
    (found,) = programs[name, gradient].call(GRAPHS[name, gradient].name, ins)
    assert excess(name, gradient, found, ins) <= 1


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_use_tiles_here(name: str, gradient: bool) -> None:
    """What the other tests say of tiles is said of tiles."""
    for machine, wanted in (("host", True), ("portable", False)):
        text = plan_kernels(GRAPHS[name, gradient], machine_of(machine)).steps[0].kernel.function.script()
        assert ("tdpbf16ps" in text) == wanted


def test_fewer_parts_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the bound: without the third parts products have the exactness of 16 bits."""
    monkeypatch.setitem(tile_conv.ORDER, 3, ((1, 1), (0, 1), (0, 0), (1, 0)))
    graph = CASES["whole"].graph("s0.fewer", False)
    ins = operands("whole", False, DRAWN["third parts agree"])
    (found,) = build([graph], tmp_path).call(graph.name, ins)
    assert excess("whole", False, found, ins) > 1


SPECIAL = {"inf": np.inf, "minus inf": -np.inf, "nan": np.nan, "largest": float(np.finfo(np.float32).max)}


@pytest.mark.parametrize("where", [0, 1], ids=["source", "weight"])
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", FAST)
def test_numbers_without_parts(name: str, gradient: bool, special: str, where: int, programs: Programs) -> None:
    """One such number among small ones: the result is what float32 has, in every place. A convolution multiplies its border, which is zeros,
    its gradient has none."""
    ins = [t.clamp(-5, 5) * 0.01 for t in operands(name, gradient, DRAWN["around zero"])]
    target = ins[where]
    target[tuple(n // 2 for n in target.shape)] = SPECIAL[special]
    (found,) = programs[name, gradient].call(GRAPHS[name, gradient].name, ins)
    (expected,) = NumpyProgram([GRAPHS[name, gradient]]).call(GRAPHS[name, gradient].name, ins)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert torch.allclose(found[finite], expected[finite], rtol=1e-5, atol=1e-5)
