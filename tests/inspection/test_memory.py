"""The room of caches among the memory of a rank."""

from __future__ import annotations

from oracles.caches.turns import Shape, turn_module

import penstock as ps
from penstock.frontends.imported import Imported
from penstock.inspection.memory.curves import CacheRoom, memory_curves
from penstock.inspection.views.text import show_memory
from penstock.models import write_mlp
from penstock.planning.model import Model

SHAPE = Shape(rows=8, sequences=3, blocks=24, cache_heads=2, size=16, dtype="bf16")


def test_caches_are_shown_with_blocks_and_bytes_of_a_token() -> None:
    model = Model(Imported(turn_module(SHAPE), {}, "none"))
    (curve,) = memory_curves(ps.plan(model, ps.Cluster.local(1, threads=[1])).module)
    # Keys and values: 24 blocks of 16 positions of 2 heads of 16 numbers of 2 bytes.
    assert curve.caches == CacheRoom(2, 24, 2 * 24 * 16 * 2 * 16 * 2, 2 * 2 * 16 * 2)
    assert curve.memory.buffers == curve.caches.bytes
    assert "rank 0: 2 caches of 24 blocks of 16 positions, 48.0 KiB of the buffers; a token takes 128 B" in show_memory(
        [curve]
    )


def test_no_line_without_caches(tmp_path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [4, 8, 2], batch=2))
    (curve,) = memory_curves(ps.plan(model, ps.Cluster.local(1, threads=[1])).module)
    assert curve.caches is None
    assert "token" not in show_memory([curve])
