"""Rows for random numbers, which are functions of what they are drawn for: nothing is remembered from one draw to the
next.

Both are Philox 2x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): ten rounds
turn a counter of two words of 32 bits and a key of one word into two words. `random_key` takes the number of a
microbatch, xor `seed` in its upper word, under the key `number`; `random` takes a place and the upper word of that
under its lower word. So what is drawn depends on the seed, the microbatch, the use and the element alone: not on
stages, schedules, devices, nor on where training was interrupted.
"""

from __future__ import annotations

from penstock.ir.types import TensorType, broadcast_shapes

from .table import Required, Types, Values, need, per_element, row

WORD = 1 << 32
# The factor of a word in a round, the number added to the key after it, and the number of rounds.
MULTIPLIER, STEP, ROUNDS = 0xD256D193, 0x9E3779B9, 10


def _key(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(x[0].dtype == "i64", f"needs the number of a microbatch in i64, got {x[0]}")
    for name in ("number", "seed"):
        value = a[name]
        need(isinstance(value, int) and 0 <= value < WORD, f"attribute {name} must have 32 bits, got {value}")
    return (x[0],)


def _random(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(x[0].dtype == "u32" and x[1].dtype == "i64", f"needs places in u32 and a key in i64, got {x[0]} and {x[1]}")
    return (TensorType("f32", broadcast_shapes(x[0].shape, x[1].shape)),)


ROWS = (
    row(
        "random_key",
        "elementwise",
        1,
        _key,
        "the key of one use of random numbers in the microbatch of that number",
        number=Required(int),
        seed=0,
        flops=per_element(60),
    ),
    row(
        "random",
        "elementwise",
        2,
        _random,
        "a number in [0, 1), 24 bits of it, for each place, from (place, key)",
        flops=per_element(60),
    ),
)
