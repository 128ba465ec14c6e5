"""Gradients of convolutions for their weights on tile registers, against float64: as exact as float32 whatever the sizes. Skipped where the processor has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.tvm.kernels.conv.weight import lines as conv_weight_lines
from penstock.backends.tvm.kernels.conv.weight import tiles as conv_weight_tiles
from penstock.backends.tvm.kernels.conv.weight.lines import Axis, LineLayout, find_plan
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.ir.graph import Graph, Op
from penstock.ir.ops import make
from penstock.ir.types import numpy_dtype

from ....cases import OpCase, build, compare, make_args, to_torch, value

pytestmark = pytest.mark.skipif(not allow_tiles(), reason="this machine has no tile registers")

# Half a unit in the last place of f32.
U = 2.0**-24


@dataclass(frozen=True)
class Case:
    """`pads` are those of ONNX: begins, then ends."""

    images: int
    channels: int
    filters: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)
    groups: int = 1

    @property
    def window(self) -> dict[str, object]:
        return {"strides": self.strides, "pads": self.pads, "dilations": self.dilations, "groups": self.groups}

    @property
    def x(self) -> tuple[int, ...]:
        return (self.images, self.channels, *self.sizes)

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.filters, self.channels // self.groups, *self.kernel)

    @property
    def dy(self) -> tuple[int, ...]:
        rank = len(self.sizes)
        spatial = (
            (n + self.pads[i] + self.pads[i + rank] - d * (k - 1) - 1) // s + 1
            for i, (n, k, s, d) in enumerate(zip(self.sizes, self.kernel, self.strides, self.dilations, strict=True))
        )
        return (self.images, self.filters, *spatial)

    def graph(self, name: str, dtype: str = "f32") -> Graph:
        x, dy = (f"{dtype}[{','.join(map(str, dims))}]" for dims in (self.x, self.dy))
        return OpCase("conv_grad_weight", (x, dy), {"shape": self.weight, **self.window}).graph(f"s0.{name}")  # type: ignore[dict-item]

    def exact(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """In float64; zeros of the border times infinities are nans, as everywhere."""
        rank = len(self.sizes)
        border = [(0, 0), (0, 0), *zip(self.pads[:rank], self.pads[rank:], strict=True)]
        padded = np.pad(x.astype(np.float64), border)
        found = np.zeros(self.weight)
        channels, filters = self.channels // self.groups, self.filters // self.groups
        for tap in np.ndindex(*self.kernel):
            where = tuple(
                slice(t * d, t * d + (o - 1) * s + 1, s)
                for t, d, s, o in zip(tap, self.dilations, self.strides, dy.shape[2:], strict=True)
            )
            for g in range(self.groups):
                part = padded[(slice(None), slice(g * channels, (g + 1) * channels), *where)].reshape(
                    self.images, channels, -1
                )
                outs = dy[:, g * filters : (g + 1) * filters].astype(np.float64).reshape(self.images, filters, -1)
                # One sum for each pair: a product of matrices may go another way for infinities.
                with np.errstate(invalid="ignore"):
                    found[(slice(g * filters, (g + 1) * filters), slice(None), *tap)] = np.einsum(
                        "nop,ncp->oc", outs, part
                    )
        return found


CASES = {
    "3x3": Case(2, 32, 32, (12, 20), (3, 3), pads=(1, 1, 1, 1)),
    "ragged": Case(4, 37, 51, (13, 17), (3, 3), pads=(1, 1, 1, 1)),
    "one image": Case(1, 32, 48, (16, 24), (3, 3), pads=(1, 1, 1, 1)),
    "one image, one row": Case(1, 64, 64, (1, 400), (1, 3), pads=(0, 1, 0, 1)),
    "three images": Case(3, 48, 32, (9, 18), (3, 3), pads=(1, 1, 1, 1)),
    "five images of one tap": Case(5, 48, 32, (7, 7), (1, 1)),
    "one tap": Case(2, 96, 64, (20, 14), (1, 1)),
    "one tap, stride": Case(4, 64, 64, (14, 14), (1, 1), strides=(2, 2)),
    "one tap, stride, wide": Case(4, 64, 96, (17, 35), (1, 1), strides=(2, 3)),
    "stride": Case(2, 48, 64, (28, 30), (3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "stride without border": Case(2, 40, 64, (27, 31), (3, 3), strides=(2, 2)),
    "stride of three, ragged": Case(2, 40, 72, (29, 31), (5, 4), strides=(3, 2), pads=(2, 0, 1, 3)),
    "dilation": Case(2, 32, 64, (19, 23), (3, 3), pads=(2, 2, 2, 2), dilations=(2, 2)),
    "dilation and stride": Case(2, 32, 64, (25, 23), (3, 3), strides=(2, 2), pads=(3, 1, 3, 1), dilations=(3, 2)),
    "one-sided border": Case(2, 32, 64, (15, 21), (3, 3), pads=(0, 2, 2, 0)),
    "wide border": Case(2, 32, 64, (12, 16), (3, 3), pads=(3, 4, 5, 3)),
    "7x7": Case(2, 32, 32, (18, 18), (7, 7), pads=(3, 3, 3, 3)),
    "patches": Case(2, 32, 64, (32, 32), (4, 4), strides=(4, 4)),
    "groups": Case(2, 96, 64, (14, 14), (3, 3), pads=(1, 1, 1, 1), groups=2),
    "line": Case(2, 48, 64, (211,), (5,), strides=(1,), pads=(2, 2), dilations=(1,)),
    "many rows": Case(2, 64, 32, (160, 24), (3, 3), pads=(1, 1, 1, 1)),
    "many channels": Case(4, 416, 64, (40, 40), (1, 1)),
    "small images": Case(6, 64, 64, (5, 5), (3, 3), pads=(1, 1, 1, 1)),
}


@pytest.fixture(scope="module", autouse=True)
def always_tiles():
    """Whatever the estimate says: sizes here are small."""
    patch = pytest.MonkeyPatch()
    patch.setattr(conv_weight_tiles, "vector_cycles", lambda *_: float("inf"))
    patch.setenv("PENSTOCK_CACHE", "off")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    return {name: case.graph(f"w{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, graphs: dict[str, Graph], always_tiles: None):
    return build(list(graphs.values()), tmp_path_factory.mktemp("weights"))


def operands(case: Case, drawn: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if drawn == "around zero":
            return rng.standard_normal(shape).astype(np.float32)
        # The first part is 1, the second 2**-9, the third positive: what is lost of third parts adds up.
        return (1 + 2.0**-9 + rng.integers(38, 60, shape) * 2.0**-23).astype(np.float32)

    return draw(case.x), draw(case.dy)


def excess(case: Case, found: np.ndarray, x: np.ndarray, dy: np.ndarray) -> float:
    """The error over what a float32 sum may lose: in practice some sqrt(k) u of the magnitudes, more where nearly equal numbers round alike."""
    k = case.images * int(np.prod(case.dy[2:]))
    bound = 3 * U * (2 + np.sqrt(k)) * case.exact(np.abs(x), np.abs(dy)) + 1e-30
    return float(np.max(np.abs(found.astype(np.float64) - case.exact(x, dy)) / bound))


def uses_tiles(graph: Graph, machine: str = "host") -> bool:
    return "tdpbf16ps" in plan_kernels(graph, machine_of(machine)).steps[0].kernel.function.script()


@pytest.mark.parametrize("drawn", ["around zero", "third parts agree"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_exact_as_float32(name: str, drawn: str, program, graphs: dict[str, Graph]) -> None:
    case = CASES[name]
    assert uses_tiles(graphs[name])
    assert not uses_tiles(graphs[name], "portable")
    x, dy = operands(case, drawn)
    (found,) = program.call(graphs[name].name, [to_torch(x), to_torch(dy)])
    assert excess(case, found.numpy(), x, dy) <= 1
    # Called again, over what the first call left in memory.
    again = program.call(graphs[name].name, [to_torch(x), to_torch(dy)])[0]
    assert torch.equal(found, again)


def test_fewer_parts_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the bound."""
    monkeypatch.setitem(conv_weight_tiles.ORDER, 3, ((1, 1), (0, 1), (0, 0), (1, 0)))
    case = CASES["3x3"]
    graph = case.graph("fewer")
    x, dy = operands(case, "third parts agree")
    (found,) = build([graph], tmp_path).call(graph.name, [to_torch(x), to_torch(dy)])
    assert excess(case, found.numpy(), x, dy) > 1


def test_a_wrong_border_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the lines: without the column that separates rows, taps read the end of one row as the begin of the next."""
    monkeypatch.setattr(Axis, "pitch", lambda self: self.out)
    case = replace(CASES["3x3"], images=4)
    graph = case.graph("narrow")
    x, dy = operands(case, "around zero")
    (found,) = build([graph], tmp_path).call(graph.name, [to_torch(x), to_torch(dy)])
    assert excess(case, found.numpy(), x, dy) > 1


def layouts(case: Case) -> list[LineLayout]:
    axes = [
        Axis(*n)
        for n in zip(case.sizes, case.dy[2:], case.kernel, case.strides, case.dilations, case.pads[:2], strict=True)
    ]
    return list(conv_weight_lines._layouts(axes[0], axes[1], case.images))


BLOCKED = {
    "3x3": replace(CASES["3x3"], images=4, channels=80, filters=48),
    "three images, stride": Case(3, 80, 40, (15, 19), (3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    "one tap": Case(4, 80, 40, (12, 8), (1, 1)),
    "one tap, stride": Case(2, 80, 40, (24, 16), (1, 1), strides=(2, 2)),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_all_ways_to_cut_the_sum(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands that do not divide the image, pairs together, channels in several rounds."""
    case = BLOCKED[name]
    x, dy = operands(case, "around zero")
    wanted = layouts(case)
    chosen = wanted[:: max(len(wanted) // 6, 1)]
    assert any(n.blocks > 1 for n in chosen)
    found: list[Graph] = []
    plans = iter([conv_weight_lines.PackingPlan(layout, 1 + i % 3, 0.0) for i, layout in enumerate(chosen)])
    monkeypatch.setattr(conv_weight_tiles, "find_plan", lambda *_: next(plans))
    for i in range(len(chosen)):
        # One by one: equal operations of one build are one kernel.
        graph = case.graph(f"cut{i}")
        found.append(graph)
        (result,) = build([graph], tmp_path / str(i)).call(graph.name, [to_torch(x), to_torch(dy)])
        assert excess(case, result.numpy(), x, dy) <= 1, chosen[i]


SPECIAL = {"inf": np.inf, "nan": np.nan, "largest": float(np.finfo(np.float32).max)}


@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("name", ["ragged", "three images", "one tap, stride", "groups", "stride"])
def test_numbers_without_parts(name: str, special: str, where: str, program, graphs: dict[str, Graph]) -> None:
    """One such number among small ones: the result is what float32 has, in every place."""
    case = CASES[name]
    x, dy = (np.clip(v * np.float32(0.01), -0.05, 0.05) for v in operands(case, "around zero"))
    target = x if where == "x" else dy
    place = tuple(n // 2 for n in target.shape)
    target[place] = SPECIAL[special]
    (result,) = program.call(graphs[name].name, [to_torch(x), to_torch(dy)])
    found, exact = result.numpy(), case.exact(x, dy)
    expected = exact.astype(np.float32)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    assert np.allclose(found[finite], expected[finite], rtol=1e-5, atol=1e-5)
    # The next call starts from good numbers again.
    target[place] = 0
    (result,) = program.call(graphs[name].name, [to_torch(x), to_torch(dy)])
    assert excess(case, result.numpy(), x, dy) <= 1


@pytest.mark.parametrize("name", ["ragged", "stride", "one tap", "three images"])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    graph = case.graph("bf", "bf16")
    assert uses_tiles(graph)
    x, dy = (v.astype(numpy_dtype("bf16")) for v in operands(case, "around zero"))
    (found,) = build([graph], tmp_path).call(graph.name, [to_torch(x), to_torch(dy)])
    exact = case.exact(x.astype(np.float32), dy.astype(np.float32))
    # Rounded once: half a unit of the last of 8 bits, and what the sum loses.
    assert np.all(np.abs(found.float().numpy() - exact) <= 2.0**-8 * np.abs(exact) + 1e-4)


@pytest.mark.parametrize("name", ["ragged", "stride", "one tap"])
def test_a_gradient_is_added_to_its_variable(name: str, tmp_path: Path) -> None:
    """And stored, in one kernel. Whole numbers, so that the interpreter's order of sums does not matter."""
    case = CASES[name]
    x, dy = (value(n, f"f32[{','.join(map(str, dims))}]") for n, dims in (("x", case.x), ("dy", case.dy)))
    made = make("conv_grad_weight", [x, dy], ["dw"], kernel="k0", shape=case.weight, **case.window)  # type: ignore[arg-type]
    added = Op("accum", made.outs, (), {"var": "w", "slot": "grad", "kernel": "k0"})
    graph = Graph("s0.accum", (x, dy), made.outs, (made, added))
    rng = np.random.default_rng(6)
    args = [np.round(4 * a) for a in make_args(graph, rng)]
    assert uses_tiles(graph)
    assert not compare(build([graph], tmp_path), graph, args)


def test_the_estimate_leaves_few_channels_to_vectors() -> None:
    axis = Axis(224, 112, 7, 2, 1, 3)
    plan = find_plan(axis, axis, 8, 64, 3, 3)
    assert plan is not None
    assert plan.cycles > conv_weight_lines.vector_cycles((64, 3), (112, 112), 8, 49)
