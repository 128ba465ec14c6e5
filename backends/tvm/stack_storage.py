"""The pass that puts scratch memory of a kernel on the stack.

TVM keeps arrays below 1024 bytes there, and takes larger ones from a pool of the thread: two calls and a search each
time, as long as a small loop takes. Those of known size go on the stack here, as many as a limit allows. Arrays inside
of more loops come first, because they are allocated more often; equal ones in the order of the code.

In: a kernel behind StorageRewrite, which drops annotations. Out: the kernel, with TVM's annotation at those arrays.

Limit: the stack of a thread may be as small as 512 KiB, and the frames of a kernel and of its parallel loop lie on each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from math import prod
from typing import Any

from tvm import tirx

# Bytes of all arrays of a kernel that this pass puts on the stack.
_MOST_BYTES = 1 << 16
# TVM's limit, below which arrays are on the stack anyhow.
_LEAST_BYTES = 1024
_ON_STACK = "disable_lower_builtin"


def keep_on_stack(function: Any) -> Any:
    """Return a kernel with as many arrays on the stack as fit."""
    arrays = list(_arrays(function.body, 0))
    chosen, left = set[int](), _MOST_BYTES
    for number in sorted(range(len(arrays)), key=lambda i: -arrays[i][0]):
        size = arrays[number][1]
        if _LEAST_BYTES <= size <= left:
            chosen.add(number)
            left -= size
    if not chosen:
        return function
    numbers = count()

    def annotated(statement: Any) -> Any:
        if isinstance(statement, tirx.AllocBuffer):
            return (
                tirx.AllocBuffer(statement.buffer, {_ON_STACK: tirx.IntImm("bool", 1)})
                if next(numbers) in chosen
                else statement
            )
        return _with_parts(statement, annotated)

    return function.with_body(annotated(function.body))


def _arrays(statement: Any, depth: int) -> Iterator[tuple[int, int]]:
    """Yield the number of loops around each array, and its bytes: 0 where they are not known or not of the CPU's
    memory."""
    if isinstance(statement, tirx.AllocBuffer):
        buffer = statement.buffer
        known = buffer.scope() == "global" and all(isinstance(n, tirx.IntImm) for n in buffer.shape)
        yield depth, prod(int(n) for n in buffer.shape) * buffer.dtype.itemsize if known else 0
    deeper = depth + isinstance(statement, tirx.For)
    for part in _parts(statement):
        yield from _arrays(part, deeper)


def _parts(statement: Any) -> list[Any]:
    """Return the statements inside of one, in order."""
    if isinstance(statement, tirx.SeqStmt):
        return list(statement.seq)
    if isinstance(statement, tirx.IfThenElse):
        return [x for x in (statement.then_case, statement.else_case) if x is not None]
    return [statement.body] if isinstance(statement, tirx.For | tirx.AttrStmt) else []


def _with_parts(statement: Any, change: Callable[[Any], Any]) -> Any:
    """Return a statement with the statements inside of it changed, in order."""
    parts = [change(part) for part in _parts(statement)]
    if isinstance(statement, tirx.SeqStmt):
        return tirx.SeqStmt(parts)
    if isinstance(statement, tirx.IfThenElse):
        return tirx.IfThenElse(statement.condition, parts[0], parts[1] if len(parts) > 1 else None)
    if isinstance(statement, tirx.For):
        s = statement
        return tirx.For(s.loop_var, s.min, s.extent, s.kind, *parts, s.thread_binding, s.annotations, s.step)
    if isinstance(statement, tirx.AttrStmt):
        return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, *parts)
    return statement
