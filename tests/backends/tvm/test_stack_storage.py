"""Scratch memory on the stack: which arrays go there, that they fit a small stack, and that numbers stay the interpreter's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from penstock.backends.tvm import stack_storage
from penstock.backends.tvm.kernels.tools.emit import Buffer, Emitter, Expr
from penstock.backends.tvm.stack_storage import keep_on_stack
from penstock.ir.graph import Graph

from .cases import build, compare, make_args, value
from .test_packed import Writer

ON_STACK = 'annotations={"disable_lower_builtin": T.bool(True)}'


def kernel(emit: Emitter, write: Callable[[Buffer], None]) -> Any:
    write(tirx.decl_buffer((1 << 20,), "float32", name="out"))
    return tirx.PrimFunc([], emit.build())


def lines(function: Any) -> dict[str, bool]:
    """Return for each allocated array if it is on the stack."""
    rows = [line.strip() for line in str(function.script()).splitlines() if "T.alloc_buffer" in line]
    return {row.partition(" = ")[0]: ON_STACK in row for row in rows}


def use(emit: Emitter, size: int, name: str, out: Buffer, index: Expr = 0) -> None:
    array = emit.alloc(size, "f32", name)
    emit.store(array, tirx.FloatImm("float32", 1.0), tirx.IntImm("int32", size - 1))
    emit.store(out, tirx.BufferLoad(array, [size - 1]), index)


def test_arrays_of_inner_loops_come_first_and_a_limit_holds() -> None:
    emit = Emitter()

    def write(out: Buffer) -> None:
        use(emit, 8192, "outer", out)
        use(emit, 255, "small", out)
        with emit.loop(8, tirx.ForKind.PARALLEL) as i, emit.when(i < 5):
            use(emit, 4096, "middle", out, i)
            with emit.loop(4) as j:
                use(emit, 12288, "inner", out, i * 4 + j)
                use(emit, 256, "least", out, i * 4 + j)
                use(emit, 1 << 15, "large", out, i * 4 + j)

    found = lines(keep_on_stack(kernel(emit, write)))
    chosen = {name.rstrip("0123456789"): yes for name, yes in found.items()}
    # 12288 and 256 elements leave 15360 bytes: neither 4096 elements of the middle nor 8192 outside fit there.
    assert chosen == {"outer": False, "small": False, "middle": False, "inner": True, "least": True, "large": False}


def test_a_kernel_without_such_arrays_is_left_alone() -> None:
    emit = Emitter()
    function = kernel(emit, lambda out: use(emit, 255, "small", out))
    assert keep_on_stack(function) is function


def convolutions() -> Graph:
    """Return kernels that take much scratch memory: copies of the source, sums, and turned blocks."""
    w = Writer()
    x = value("x", "f32[1,16,28,28]")
    y = w("conv", x, w.read("a", "f32[32,16,3,3]"), strides=(2, 2), pads=(1, 1, 1, 1))
    y = w("relu", w("conv", y, w.read("b", "f32[32,1,5,5]"), pads=(2, 2, 2, 2), groups=32))
    y = w("conv", y, w.read("c", "f32[32,1,3,3]"), strides=(2, 2), pads=(1, 1, 1, 1), groups=32)
    return w.fused((x,), (y,))


@pytest.mark.parametrize("target", ["host", "x86-64-v3"])
def test_a_thread_of_a_small_stack_computes_the_interpreters_numbers(target: str, tmp_path: Path) -> None:
    graph = convolutions()
    program = build([graph], tmp_path, target)
    different: list[object] = ["not run"]

    def run() -> None:
        different[:] = [compare(program, graph, make_args(graph, np.random.default_rng(3)))]

    before = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
    finally:
        threading.stack_size(before)
    assert not different[0], "the thread computed other numbers, or nothing"


def test_control_a_limit_of_nothing_leaves_all_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Emitter()
    function = kernel(emit, lambda out: use(emit, 512, "array", out))
    assert list(lines(keep_on_stack(function)).values()) == [True]
    monkeypatch.setattr(stack_storage, "_MOST_BYTES", 0)
    assert list(lines(keep_on_stack(function)).values()) == [False]
