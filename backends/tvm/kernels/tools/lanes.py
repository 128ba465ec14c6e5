"""Operations on all lanes of a vector at once: AVX-512 instructions that TIR lacks, and a slow path for rare operands.

In: values named in a vector loop (Emitter.bind). Out: values of the same loop, which is cut in two around the
statement. Limit: the instructions are there for vectors of 16 floats, so callers test `Wide.usable` and have a formula
for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from .emit import SERIAL, Buffer, Emitter, Expr, dtype_name

_LANES = 16
# Round as the mode register says.
_ROUNDING = 4
# mantissa: within [3/4, 3/2), nan for negative numbers.
_AROUND_ONE = 3 | 2 << 2


def _int32(value: int) -> Any:
    return tirx.IntImm("int32", value)


def _kept(emit: Emitter, value: Expr) -> Buffer:
    """Store a value in an array with an element for each lane."""
    buffer = emit.name_lanes(dtype_name(value), "u")
    emit.add(tirx.BufferStore(buffer, value, [emit.lane()]))
    return buffer


class Wide:
    """Instructions of AVX-512 on f32. Each costs one to three steps of the processor and is right for
    nan, infinities, zeros and denormals."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit

    def usable(self) -> bool:
        return self.emit.width() == _LANES and self.emit.may_pause()

    def exponent(self, x: Expr) -> Expr:
        """Return the largest whole number whose power of two is not above |x|, as a float: -inf for 0, inf for inf."""
        return self._call("mask.getexp", [x], lambda v: [v[0], v[0], _all(), _int32(_ROUNDING)])

    def mantissa(self, x: Expr) -> Expr:
        """Return x divided by a power of two, within [3/4, 3/2): 1 for 0 and inf, nan for negative numbers."""
        return self._call("mask.getmant", [x], lambda v: [v[0], _int32(_AROUND_ONE), v[0], _all(), _int32(_ROUNDING)])

    def scaled(self, x: Expr, exponent: Expr) -> Expr:
        """Return x times two to the power of a whole float, rounded once, whatever its size."""
        return self._call("mask.scalef", [x, exponent], lambda v: [v[0], v[1], v[0], _all(), _int32(_ROUNDING)])

    def inverse_root(self, x: Expr) -> Expr:
        """Return 1 / sqrt(x), within 2^-14: inf for 0, 0 for inf."""
        return self._call("rsqrt14", [x], lambda v: [v[0], v[0], _all()])

    def _call(self, name: str, operands: list[Expr], arguments: Callable[[list[Expr]], list[Any]]) -> Expr:
        emit = self.emit
        kept = [_kept(emit, x) for x in operands]
        result = emit.name_lanes("float32", "w")
        with emit.paused():
            every = tirx.Ramp(0, 1, _LANES)
            values = arguments([tirx.BufferLoad(buffer, [every]) for buffer in kept])
            call = tirx.call_llvm_pure_intrin(f"float32x{_LANES}", f"llvm.x86.avx512.{name}.ps.512", *values)
            emit.add(tirx.BufferStore(result, call, [every]))
        return tirx.BufferLoad(result, [emit.lane()])


def _all() -> Any:
    return tirx.IntImm("int16", -1)


def mend(emit: Emitter, value: Expr, rare: Expr, exact: Callable[[Expr], Expr], x: Expr, kind: Any = SERIAL) -> Expr:
    """Return `value`, and exact(x) where `rare` holds. A vector without such lanes takes one comparison; where there
    are some, exact(x) is taken for them one by one, or, with `kind` VECTOR, for all lanes."""
    width = emit.width()
    if width == 1 or not emit.may_pause():
        return emit.bind(tirx.if_then_else(rare, exact(x), value))
    flags = _kept(emit, tirx.Select(rare, _int32(1), _int32(0)))
    operand, result = _kept(emit, x), _kept(emit, value)
    with emit.paused():
        every = tirx.Ramp(0, 1, width)
        any_of_them = tirx.call_llvm_pure_intrin("int32", "llvm.vector.reduce.or", tirx.BufferLoad(flags, [every]))
        with emit.when(tirx.NE(any_of_them, 0)), emit.loop(width, kind, "j") as j:
            exactly = tirx.BufferStore(result, exact(tirx.BufferLoad(operand, [j])), [j])
            emit.add(
                tirx.IfThenElse(tirx.NE(tirx.BufferLoad(flags, [j]), 0), exactly, None) if kind == SERIAL else exactly
            )
    return tirx.BufferLoad(result, [emit.lane()])
