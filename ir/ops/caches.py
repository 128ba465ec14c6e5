"""Rows for caches: what a sequence computed before, kept in variables in blocks of 16 positions.

A cache is f32 or bf16 [blocks, 16, heads, size]. Position p of a sequence lies in row p mod 16 of the block that entry
p div 16 of its line in `table` names. So sequences grow without being moved, and any number of them share a variable.

`put` stores rows at flat places, block * 16 + row, and gives the variable as it is then; order is a matter of values,
because `attend` takes what `put` gave. Lengths are data: buffers have the size of the bound, loops end at the lengths.

`pick` draws with whole numbers, so that every back end picks the same. The weight of a logit is 2^(40 - d), d =
(largest - logit) / (temperature * log 2) in steps of 2^-20. The draw is Philox 2x32-10 (draws.py) of the position under
the seed of the request.
"""

from __future__ import annotations

from penstock.ir.types import TensorType

from .table import Required, Types, Values, need, row

# Positions of a block.
BLOCK = 16
CACHE_DTYPES = ("f32", "bf16")
# The exponent of the largest weight, the steps of an exponent, and the exponent at which a weight is nothing.
TOP_BITS, STEP_BITS, LOWEST_EXPONENT = 40, 20, 40
# 2^-x for x in [0, 1) as a polynomial with coefficients in 2^-30, evaluated in whole numbers: the highest power first.
WEIGHT_POLYNOMIAL = (-1078399, 10034814, -59495443, 257928751, -744260871, 1073741824)


def check_put(var: str, x: Types, cache: TensorType) -> None:
    """Raise TypeError unless rows and places fit a variable."""
    rows, places = x
    need(
        cache.rank == 4 and cache.dtype in CACHE_DTYPES and cache.shape[1] == BLOCK,
        f"@{var} is {cache}, a cache is f32 or bf16 [blocks, {BLOCK}, heads, size]",
    )
    need(
        rows.shape[1:] == cache.shape[2:] and rows.rank == 3 and rows.dtype in ("f32", cache.dtype),
        f"rows for @{var} : {cache} must be f32[rows,{cache.shape[2]},{cache.shape[3]}], got {rows}",
    )
    need(places == TensorType("i32", rows.shape[:1]), f"places of {rows} must be i32[{rows.shape[0]}], got {places}")


def _put(x: Types, a: Values) -> tuple[TensorType, ...]:
    raise TypeError("the type of the variable is that of the result")


def _attend(x: Types, a: Values) -> tuple[TensorType, ...]:
    q, keys, values, starts, lengths, table = x
    need(
        keys == values and keys.rank == 4 and keys.dtype in CACHE_DTYPES and keys.shape[1] == BLOCK,
        f"keys and values must be of one type, f32 or bf16 [blocks, {BLOCK}, heads, size], got {keys} and {values}",
    )
    need(
        q.dtype == "f32" and q.rank == 3 and q.shape[2] == keys.shape[3],
        f"queries must be f32[rows, heads, {keys.shape[3]}], got {q}",
    )
    need(
        keys.dims[2] > 0 and q.dims[1] % keys.dims[2] == 0,
        f"the {q.shape[1]} heads of the queries must be a multiple of the {keys.shape[2]} of the cache",
    )
    need(0 not in keys.shape, f"a cache must have room, got {keys}")
    need(lengths.dtype == "i32" and lengths.rank == 1, f"lengths must be i32[sequences], got {lengths}")
    need(
        starts == TensorType("i32", (lengths.dims[0] + 1,)),
        f"starts of {lengths.shape[0]} sequences must be i32[{lengths.dims[0] + 1}], got {starts}",
    )
    need(
        table.dtype == "i32" and table.rank == 2 and table.shape[0] == lengths.shape[0],
        f"the table must be i32[{lengths.shape[0]}, blocks of a sequence], got {table}",
    )
    need(isinstance(a["window"], int) and a["window"] >= 0, f"window must be 0 or more, got {a['window']}")
    need(isinstance(a["cap"], float) and a["cap"] >= 0, f"cap must be 0 or more, got {a['cap']}")
    return (q,)


def _pick(x: Types, a: Values) -> tuple[TensorType, ...]:
    logits, draws, temperature, top_k, top_p = x
    need(logits.rank == 2 and logits.dtype == "f32", f"logits must be f32[sequences, words], got {logits}")
    need(logits.dims[1] > 0 or logits.dims[0] == 0, f"there is no word to pick from in {logits}")
    count = logits.shape[0]
    wanted = (
        ("draws", draws, TensorType("u64", (count, 2))),
        ("temperature", temperature, TensorType("f32", (count,))),
        ("top_k", top_k, TensorType("i32", (count,))),
        ("top_p", top_p, TensorType("f32", (count,))),
    )
    for name, got, expected in wanted:
        need(got == expected, f"{name} must be {expected}, got {got}")
    return (TensorType("i64", (count,)),)


def _attend_flops(x: Types, y: Types, a: Values) -> float:
    """Count the work of sequences that fill their lines of the table."""
    q, table = x[0], x[5]
    return 4.0 * q.size * table.dims[1] * BLOCK


ROWS = (
    row(
        "put",
        "state",
        2,
        _put,
        "stores row i at place places[i] of a cache (block * 16 + row), skips -1, and gives the cache as it is then; "
        "from (rows, places)",
        var=Required(str),
        effect=True,
        dims="t^ h d^, t^ -> b^ r^ h d^",
    ),
    row(
        "attend",
        "cache",
        6,
        _attend,
        "attention over caches, from (q, keys, values, starts, lengths, table): rows starts[s] to starts[s+1] are the "
        "last of the lengths[s] positions of sequence s, which lie in the blocks of table[s], and look at no later "
        "one; rows behind starts[S] give 0; `window`: at the last so many positions alone; `cap` * tanh(score / cap)",
        scale=Required(float),
        window=0,
        cap=0.0,
        flops=_attend_flops,
        dims="t^ (h g^) d^, b^ r^ h d^, b^ r^ h d^, c^, s^, s^ n^ -> t^ (h g^) d^",
    ),
    row(
        "pick",
        "cache",
        5,
        _pick,
        "the word of each row, from (logits, draws, temperature, top_k, top_p): the first largest where temperature is "
        "0, else one drawn under draws = (seed, position) from the top_k largest (0: all) and of these from as many of "
        "the largest as reach the share top_p; equal ones stay together",
        flops=lambda x, y, a: 20.0 * x[0].size,
        dims="s v^, s c^, s, s, s -> s",
    ),
)
