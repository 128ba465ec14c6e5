"""Kernels of caches: their bytes are those of rows and live blocks, and what fills a cache leaves weights packed."""

from __future__ import annotations

from oracles.caches.turns import Shape, turn_graph

from penstock.passes.kernels.divide import bytes_moved, kernels_of
from penstock.passes.kernels.fuse import choose_kernels

SHAPE = Shape(rows=8, sequences=3, blocks=1000, heads=4, cache_heads=2, size=16, dtype="bf16", per_sequence=5)


def test_a_turn_moves_rows_and_blocks_of_its_table() -> None:
    kernels = kernels_of(choose_kernels(turn_graph(SHAPE, "s0.F")))
    assert [[op.kind for op in kernel.ops] for kernel in kernels] == [["put"], ["put"], ["attend"]]
    row = SHAPE.cache_heads * SHAPE.size
    put = SHAPE.rows * (row * 4 + row * 2 + 4)
    blocks = 2 * SHAPE.sequences * SHAPE.per_sequence * 16 * row * 2
    rows = 2 * SHAPE.rows * SHAPE.heads * SHAPE.size * 4
    numbers = 4 * (SHAPE.sequences + 1 + SHAPE.sequences + SHAPE.sequences * SHAPE.per_sequence)
    assert [bytes_moved(kernel.body, kernel.ops) for kernel in kernels] == [put, put, blocks + rows + numbers]


def test_control_a_larger_pool_changes_no_bytes_and_a_longer_table_does() -> None:
    def moved(**changed: int) -> float:
        graph = turn_graph(Shape(**{**SHAPE.__dict__, **changed}), "s0.F")
        return sum(bytes_moved(kernel.body, kernel.ops) for kernel in kernels_of(choose_kernels(graph)))

    assert moved() == moved(blocks=2000) < moved(per_sequence=6)
