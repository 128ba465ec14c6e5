"""Pools by lines, compiled, against windows in NumPy: element types, strides, borders, dimensions, nan, instruction sets."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.tvm.kernels.conv import pool_lines
from penstock.ir.graph import Graph

from ...cases import OpCase, build

# x, then the window.
POOLS = [
    ((2, 3, 9, 37), {"window": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 2, 8, 140), {"window": (2, 2), "strides": (2, 2)}),
    ((1, 2, 6, 41), {"window": (3, 5), "strides": (1, 1), "pads": (1, 2, 1, 2)}),
    ((1, 2, 9, 30), {"window": (2, 4), "strides": (3, 2), "pads": (1, 3, 0, 0)}),
    ((2, 3, 50), {"window": (4,), "strides": (2,), "pads": (1, 2)}),
    ((1, 2, 5, 6, 19), {"window": (2, 3, 3), "strides": (1, 2, 1), "pads": (1, 0, 1, 0, 1, 1)}),
]
KINDS = {"u8": torch.uint8, "i8": torch.int8, "i32": torch.int32, "f32": torch.float32, "bf16": torch.bfloat16}


def by_hand(x: np.ndarray, window: dict[str, tuple[int, ...]]) -> np.ndarray:
    """The largest element of each window: padding is below all, nan is above all."""
    kernel = window["window"]
    rank = len(kernel)
    strides, pads = window["strides"], window.get("pads", (0,) * 2 * rank)
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    around = ((0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True))
    wide = np.pad(x, around, constant_values=lowest)
    views = np.lib.stride_tricks.sliding_window_view(wide, kernel, axis=tuple(range(2, 2 + rank)))
    steps = (slice(None), slice(None), *(slice(None, None, s) for s in strides))
    return views[steps].max(axis=tuple(range(-rank, 0)))


def graphs(kind: str) -> list[Graph]:
    pools = [
        OpCase("max_pool", (f"{kind}[{','.join(map(str, x))}]",), w).graph(f"s0.y{i}") for i, (x, w) in enumerate(POOLS)
    ]
    assert all(pool_lines.pools_by_lines(op) for graph in pools for op in graph.ops if op.kind == "max_pool")
    return pools


def operands(kind: str) -> list[torch.Tensor]:
    rng = np.random.default_rng(11)
    arrays = [torch.tensor(rng.integers(-100, 100, x) + 100 * (kind == "u8")).to(KINDS[kind]) for x, _ in POOLS]
    if kind == "f32":
        arrays[0][0, 1, 4, 5] = float("nan")
    return arrays


@pytest.mark.parametrize(("kind", "target"), [*product(KINDS, ["host"]), ("u8", "portable"), ("u8", "x86-64-v2")])
def test_every_window_has_its_largest_element(kind: str, target: str, tmp_path: Path) -> None:
    program = build(graphs(kind), tmp_path, target=target)
    for i, (x, (_, window)) in enumerate(zip(operands(kind), POOLS, strict=True)):
        y = program.call(f"s0.y{i}", [x])[0]
        plain = x.float().numpy() if kind == "bf16" else x.numpy()
        np.testing.assert_array_equal((y.float() if kind == "bf16" else y).numpy(), by_hand(plain, window))


def test_a_tap_too_far_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tap = pool_lines._LinePool._tap
    monkeypatch.setattr(
        pool_lines._LinePool, "_tap", lambda self, line, k, column: tap(self, line, k + (k == 1), column)
    )
    program = build(graphs("u8"), tmp_path)
    y = program.call("s0.y0", [operands("u8")[0]])[0].numpy()
    assert not np.array_equal(y, by_hand(operands("u8")[0].numpy(), POOLS[0][1]))
