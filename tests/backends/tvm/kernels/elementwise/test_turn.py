"""Stored transpositions against NumPy: by squares, with overlaps at the ends, in every element type, and by the plain loops."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.tvm.kernels.elementwise import turn
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of
from penstock.ir.types import numpy_dtype

from ...cases import OpCase, build

Shape = tuple[int, ...]
CASES: list[tuple[Shape, Shape]] = [
    *(((rows, columns), (1, 0)) for rows, columns in itertools.product((3, 4, 15, 16, 17, 33, 100), (4, 16, 31, 129))),
    *(((5, 18, 35), perm) for perm in itertools.permutations(range(3))),
    *(((3, 17, 1, 20), perm) for perm in itertools.permutations(range(4))),
    ((2, 64, 9, 9), (0, 2, 3, 1)),
    ((2, 9, 9, 64), (0, 3, 1, 2)),
    ((2, 3, 4, 5, 6), (4, 2, 0, 3, 1)),
    ((200, 210), (1, 0)),
]
TYPES = ("f32", "f64", "i64", "i32", "f16", "bf16", "i8", "u8", "bool")


def numbered(shape: Shape, dtype: str) -> np.ndarray:
    """Elements that differ from their neighbours, by their bits."""
    size = numpy_dtype(dtype).itemsize
    counted = np.arange(int(np.prod(shape))) % 251
    if dtype == "bool":
        return np.asarray(counted * counted % 7 < 3).reshape(shape)
    return (
        counted.astype(f"u{size}").view(numpy_dtype(dtype)).reshape(shape)
        if dtype not in ("f32", "f64")
        else counted.astype(numpy_dtype(dtype)).reshape(shape)
    )


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return (
        torch.tensor(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == numpy_dtype("bf16")
        else torch.tensor(array)
    )


def wrong(program: TvmProgram, name: str, array: np.ndarray, perm: Shape) -> bool:
    (found,) = program.call(name, [as_tensor(array)])
    expected = as_tensor(np.ascontiguousarray(array.transpose(perm)))
    same_bits = torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (found, expected)))
    return (found.dtype, found.shape) != (expected.dtype, expected.shape) or not same_bits


def transposes(cases: list[tuple[Shape, Shape]], dtype: str, folder: Path, target: str = "host") -> TvmProgram:
    types = [f"{dtype}[{','.join(map(str, shape))}]" for shape, _ in cases]
    graphs = [
        OpCase("transpose", (t,), {"perm": perm}).graph(f"s0.c{i}")
        for i, (t, (_, perm)) in enumerate(zip(types, cases, strict=True))
    ]
    return build(graphs, folder, target)


def failures(
    cases: list[tuple[Shape, Shape]], dtype: str, folder: Path, target: str = "host"
) -> list[tuple[Shape, Shape]]:
    program = transposes(cases, dtype, folder, target)
    return [case for i, case in enumerate(cases) if wrong(program, f"s0.c{i}", numbered(case[0], dtype), case[1])]


@pytest.mark.parametrize(
    ("target", "every"),
    [
        ("host", 1),
        ("portable", 3),
        ("x86-64", 3),
        *(pytest.param(t, 1, marks=pytest.mark.slow) for t in ("portable", "x86-64")),
    ],
)
def test_every_element_is_in_its_place(target: str, every: int, tmp_path: Path) -> None:
    assert not failures(CASES[::every], "f32", tmp_path, target)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_moves_by_its_bits(dtype: str, tmp_path: Path) -> None:
    assert not failures([CASES[-1], CASES[-2], ((2, 9, 40, 23), (0, 3, 2, 1)), ((5, 6), (1, 0))], dtype, tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_dimensions_taken_as_one_give_the_same_transposition(data: st.DataObject) -> None:
    dims = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
    perm = tuple(data.draw(st.permutations(range(len(dims)))))
    fewer, moved = turn.merged(dims, perm)
    elements = np.arange(np.prod(dims))
    assert np.array_equal(
        elements.reshape(fewer).transpose(moved).ravel(), elements.reshape(dims).transpose(perm).ravel()
    )
    assert all(b != a + 1 for a, b in itertools.pairwise(moved))


def test_squares_are_used_where_there_is_room_for_them(tmp_path: Path) -> None:
    """Else the tests above would pass without them."""
    from penstock.backends.tvm.group import Fusion
    from penstock.backends.tvm.lower.lower import make_kernel

    def shuffles(case: tuple[Shape, Shape], dtype: str = "f32") -> int:
        graph = OpCase("transpose", (f"{dtype}[{','.join(map(str, case[0]))}]",), {"perm": case[1]}).graph("s0.F")
        return str(make_kernel(Fusion(graph.ops, graph.outs), machine_of("host")).function).count("Shuffle")

    assert all(shuffles(((40, 50), (1, 0)), dtype) for dtype in TYPES if dtype != "bool")
    assert not shuffles(((3, 50), (1, 0)))
    assert not shuffles(((40, 50, 60), (1, 0, 2)))


def test_control_dimensions_that_are_not_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were dimensions taken as one that are not neighbours, elements would be elsewhere."""
    for name in ("wrong", "right"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(turn, "merged", lambda dims, perm: ((int(np.prod(dims[:-1])), dims[-1]), (1, 0)))
    assert failures([((5, 18, 35), (2, 1, 0))], "f32", tmp_path / "wrong")
    assert not failures([((5, 18, 35), (2, 0, 1))], "f32", tmp_path / "right")
