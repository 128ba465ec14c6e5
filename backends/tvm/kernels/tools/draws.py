"""Random numbers as expressions, by Philox 2x32-10 as in ir/ops/draws.py.

In: words as uint32, or the number of a microbatch and keys as int64. Out: words, keys, floats. A round takes one
product of 64 bits, of which both halves are used; sixteen lanes of AVX-512 make sixteen numbers in about a hundred
instructions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from penstock.ir.attrs import Attr
from penstock.ir.ops.draws import MULTIPLIER, ROUNDS, STEP, WORD

from .emit import Expr

if TYPE_CHECKING:
    from .functions import Functions


def _word(value: int) -> Expr:
    return tirx.IntImm("uint32", value)


def philox(f: Functions, first: Expr, second: Expr, key: Expr) -> tuple[Expr, Expr]:
    """Return two words, from a counter of two words and a key."""
    for turn in range(ROUNDS):
        product = f.bind(tirx.Cast("uint64", first) * tirx.IntImm("uint64", MULTIPLIER))
        turned = key + _word(turn * STEP % WORD) if turn else key
        high = tirx.Cast("uint32", tirx.shift_right(product, tirx.IntImm("uint64", 32)))
        first, second = (
            f.bind(tirx.bitwise_xor(tirx.bitwise_xor(high, turned), second)),
            f.bind(tirx.Cast("uint32", product)),
        )
    return first, second


def _words(f: Functions, x: Expr) -> tuple[Expr, Expr]:
    """Split an int64 into its lower and upper word."""
    bits = f.bind(tirx.Cast("uint64", x))
    return f.bind(tirx.Cast("uint32", bits)), f.bind(
        tirx.Cast("uint32", tirx.shift_right(bits, tirx.IntImm("uint64", 32)))
    )


def random_key(f: Functions, x: Expr, number: Attr, seed: Attr) -> Expr:
    """Return the key of use `number`, from the number of a microbatch."""
    assert isinstance(number, int), number
    assert isinstance(seed, int), seed
    low, high = _words(f, x)
    first, second = philox(f, low, tirx.bitwise_xor(high, _word(seed)), _word(number))
    upper = tirx.shift_left(tirx.Cast("uint64", second), tirx.IntImm("uint64", 32))
    return tirx.Cast("int64", tirx.bitwise_or(upper, tirx.Cast("uint64", first)))


def random(f: Functions, place: Expr, key: Expr) -> Expr:
    """Return a number in [0, 1)."""
    low, high = _words(f, key)
    word, _ = philox(f, place, high, low)
    # The number has 24 bits, so a signed word holds it. Signed words become floats in one instruction.
    return tirx.Cast("float32", tirx.Cast("int32", tirx.shift_right(word, _word(8)))) * tirx.FloatImm(
        "float32", 2.0**-24
    )
