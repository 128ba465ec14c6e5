"""Gradients of pooling, compiled, against torch and the interpreter: ties, windows over the edge, strides, dilations, one to three dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ...cases import OpCase, build, compare, make_args

# x, then the window.
POOLS = [
    ((2, 3, 9, 37), {"window": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((2, 3, 8, 40), {"window": (2, 2), "strides": (2, 2)}),
    ((1, 2, 14, 23), {"window": (2, 3), "strides": (3, 3), "pads": (1, 0, 0, 2)}),
    ((1, 2, 15, 35), {"window": (3, 2), "strides": (1, 2), "dilations": (2, 3), "pads": (0, 1, 1, 1)}),
    ((2, 3, 50), {"window": (4,), "strides": (3,), "pads": (1, 2)}),
    ((1, 2, 5, 6, 19), {"window": (2, 3, 3), "strides": (1, 2, 1), "pads": (1, 0, 1, 0, 1, 1)}),
]


def pooled(x: tuple[int, ...], window: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    rank = len(x) - 2
    strides, dilations, pads = (
        window.get(k, (d,) * n) for k, d, n in (("strides", 1, rank), ("dilations", 1, rank), ("pads", 0, 2 * rank))
    )
    extents = (
        n + p + q - d * (k - 1) - 1
        for n, p, q, d, k in zip(x[2:], pads[:rank], pads[rank:], dilations, window["window"], strict=True)
    )
    return (*x[:2], *(e // s + 1 for e, s in zip(extents, strides, strict=True)))


def text(dims: tuple[int, ...]) -> str:
    return f"f32[{','.join(map(str, dims))}]"


@pytest.mark.parametrize(("x", "window"), POOLS)
def test_gradients_of_pooling(x: tuple[int, ...], window: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    y = text(pooled(x, window))
    graphs = [
        OpCase("max_pool", (text(x),), window).graph("s0.y"),
        OpCase("max_pool_grad", (text(x), y, y), window).graph("s0.max"),
    ]
    for counted in (False, True):
        graphs.append(
            OpCase("avg_pool_grad", (y,), {**window, "shape": x, "include_pad": counted}).graph(f"s0.mean{counted}")
        )
    program = build(graphs, tmp_path)
    # Few different values, so that windows have ties.
    given = rng.integers(0, 3, x).astype(np.float32)
    top = program.call("s0.y", [torch.tensor(given)])[0].numpy()
    dy = rng.standard_normal(top.shape).astype(np.float32)
    assert not compare(program, graphs[1], [given, top, dy])
    for graph in graphs[2:]:
        assert not compare(program, graph, make_args(graph, rng))


def test_the_gradient_of_a_maximum_is_torchs_at_infinities(tmp_path: Path) -> None:
    """Windows of nothing but -inf, over the edge too: the first element inside gets the gradient, never the border."""
    t, small, window = "f32[1,1,7,33]", "f32[1,1,4,17]", {"window": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    graph = OpCase("max_pool_grad", (t, small, small), window).graph("s0.F")
    x = torch.full((1, 1, 7, 33), -torch.inf)
    x[..., 3:, 20:] = torch.randn(1, 1, 4, 13)
    x[0, 0, 5, 5] = torch.nan
    y, index = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    dy = torch.randn(1, 1, 4, 17)
    expected = torch.zeros(7 * 33).index_add_(0, index.flatten(), dy.flatten()).view(1, 1, 7, 33)
    found = build([graph], tmp_path).call("s0.F", [x, y, dy])[0]
    assert torch.allclose(found, expected, atol=1e-6)
    # A gradient sent to the last of equal elements would be noticed.
    assert not torch.allclose(found, expected.flip(-1), atol=1e-6)
