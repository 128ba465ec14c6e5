"""The instructions of convolutions of bytes: sums of products of words, and vectors that are computed once."""

from __future__ import annotations

from tvm import tirx

from penstock.backends.tvm.kernels.tools.emit import Emitter, Expr, i32

# Threads share so many parts of the work or more, where there are so many.
TASKS = 8


def kept(emit: Emitter, lanes: int, value: Expr, name: str) -> Expr:
    """Name a vector, so that it is computed once."""
    buffer = emit.scratch(lanes, "int32", name)
    place = tirx.Ramp(i32(0), 1, lanes)
    emit.add(tirx.BufferStore(buffer, value, [place]))
    return tirx.BufferLoad(buffer, [place])


def byte_dot(lanes: int, depth: int, before: Expr, x: Expr, weight: Expr) -> Expr:
    """Return sums with the products of `depth` channels added to each."""
    count, kind = lanes * depth, f"int32x{lanes}"
    if depth == 4:
        data, factor = tirx.reinterpret(f"uint8x{count}", x), tirx.reinterpret(f"int8x{count}", weight)
        return tirx.call_llvm_pure_intrin(kind, "llvm.x86.avx512.vpdpbusd.512", before, data, factor)
    name = {16: "avx512.pmaddw.d.512", 8: "avx2.pmadd.wd", 4: "sse2.pmadd.wd"}[lanes]
    data, factor = (tirx.reinterpret(f"int16x{count}", words) for words in (x, weight))
    return before + tirx.call_llvm_pure_intrin(kind, f"llvm.x86.{name}", data, factor)
