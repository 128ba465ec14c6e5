"""Convolutions by tiles of positions and channels, image by image and in parts of an image, against the interpreter:
borders that are copied or asked for, strips left over, panels of three vectors, groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.backends.tvm.kernels.conv import register_tiles
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph

from ...cases import ON_TARGETS, ConvCase, build, compare, make_args

SAME, BOTH = (1, 1, 1, 1), (2, 2)
CASES = {
    "three colours": ConvCase((1, 3, 40, 37), (16, 3, 3, 3), strides=BOTH, pads=SAME),
    "even border": ConvCase((1, 3, 40, 38), (32, 3, 3, 3), strides=BOTH, pads=(0, 0, 1, 1)),
    "patches": ConvCase((1, 3, 32, 36), (24, 3, 4, 4), strides=(4, 4)),
    "forty channels": ConvCase((2, 5, 24, 20), (40, 5, 2, 2), strides=BOTH),
    "three vectors": ConvCase((1, 17, 28, 28), (48, 17, 3, 3), strides=BOTH, pads=SAME),
    "several panels": ConvCase((1, 9, 30, 26), (80, 9, 3, 3), strides=BOTH, pads=SAME),
    "large windows": ConvCase((1, 3, 33, 31), (20, 3, 7, 7), strides=BOTH, pads=(3, 3, 3, 3)),
    "dilations": ConvCase((1, 4, 29, 23), (18, 4, 3, 3), strides=BOTH, dilations=(3, 2), pads=(3, 2, 3, 2)),
    "left out": ConvCase((1, 6, 30, 30), (16, 6, 1, 2), strides=(3, 3)),
    "more rows than the source": ConvCase((1, 4, 6, 9), (17, 4, 3, 3), strides=(1, 2), pads=(4, 1, 5, 1)),
    "groups": ConvCase((2, 8, 32, 26), (64, 4, 3, 3), strides=BOTH, pads=SAME, groups=2),
    "images": ConvCase((9, 3, 18, 18), (16, 3, 3, 3), strides=BOTH, pads=SAME),
    "one row": ConvCase((1, 6, 77), (24, 6, 5), strides=(2,), pads=(2, 2), dilations=(1,)),
    "several tiles of a row": ConvCase((1, 8, 32, 121), (32, 8, 3, 3), strides=BOTH, pads=SAME),
    "both ends": ConvCase((2, 7, 63, 61), (20, 7, 3, 3), strides=BOTH, pads=SAME),
    "many filters": ConvCase((1, 9, 36, 37), (112, 9, 3, 3), strides=BOTH, pads=SAME),
    "double": ConvCase((1, 3, 32, 25), (24, 3, 3, 3), strides=BOTH, pads=SAME, dtype="f64"),
}
# Of these the gradient for the input, too: it has several phases.
GRADIENTS = ("three colours", "groups", "double")
GRAPHS = {
    (name, gradient): case.graph(f"s0.{'d' if gradient else 'f'}{i}", gradient)
    for i, (name, case) in enumerate(CASES.items())
    for gradient in (False, True)
    if not gradient or name in GRADIENTS
}


# Sources with a border that are read where they lie.
IN_PLACE = (
    *("three colours", "even border", "groups", "one row", "several tiles of a row", "both ends", "many filters"),
    "double",
)


def parts_of(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of parts of the convolutions that register tiles compute in parts."""
    seen: list[int] = []
    emitter = register_tiles._TiledCorrelation
    emit = emitter._run_parts
    monkeypatch.setattr(
        emitter, "_run_parts", lambda self, packed, parts, kind: (seen.append(parts), emit(self, packed, parts, kind))
    )
    plan_kernels(graph, machine_of("skylake-avx512"))
    monkeypatch.undo()
    return seen


@pytest.mark.parametrize(("target", "step"), ON_TARGETS)
def test_tiles_are_the_interpreters(target: str, step: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    chosen = dict(list(GRAPHS.items())[::step])
    program = build(list(chosen.values()), tmp_path, target)
    for (name, gradient), graph in chosen.items():
        assert not compare(program, graph, make_args(graph, rng)), f"{name}, gradient: {gradient}"


def test_few_weights_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: parts_of(GRAPHS[name, False], monkeypatch) for name in CASES}
    assert [name for name, count in parts.items() if count == []] == []
    assert (parts["three colours"], parts["images"], parts["one row"]) == ([4], [1], [1])
    many = ConvCase((1, 128, 14, 14), (256, 128, 3, 3), strides=BOTH, pads=SAME).graph("s0.F", False)
    assert parts_of(many, monkeypatch) == []


def test_control_a_part_that_begins_a_row_later_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = GRAPHS["several panels", False]
    copy_rows = register_tiles.BorderedSource.copy_rows
    monkeypatch.setattr(
        register_tiles.BorderedSource, "copy_rows", lambda self, image, top: copy_rows(self, image, top + 1)
    )
    program = build([graph], tmp_path)
    assert compare(program, graph, make_args(graph, np.random.default_rng(1)))


def test_sources_with_few_products_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    emitter = register_tiles._TiledCorrelation
    emit = emitter._row_tiles
    monkeypatch.setattr(emitter, "_row_tiles", lambda self, *given: (taken.append(name), emit(self, *given)))
    for name in CASES:
        plan_kernels(GRAPHS[name, False], machine_of("skylake-avx512"))
    assert tuple(dict.fromkeys(taken)) == IN_PLACE


@pytest.mark.parametrize("axis", [0, 1])
def test_control_a_border_that_nobody_asks_for_is_noticed(
    axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = GRAPHS["both ends", False]
    guarded = register_tiles._TiledCorrelation._guarded
    # Far inside on one axis: only the other one is asked for.
    far = 4
    monkeypatch.setattr(
        register_tiles._TiledCorrelation,
        "_guarded",
        lambda self, at, top, left, k: guarded(self, at, *((far, left) if axis == 0 else (top, far)), k),
    )
    program = build([graph], tmp_path)
    assert compare(program, graph, make_args(graph, np.random.default_rng(1)))
