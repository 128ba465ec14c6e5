"""GPU kernels as loops for the CPU: the same TIR function, its grid turned into loops, so that its meaning can be tested without a GPU.

A launch becomes a loop over blocks; the statements of a block, cut at the barriers, become one loop over threads each. What belongs to a thread and
lives across a barrier gets one place per thread. Within a cut, threads run one after the other, forwards or backwards: a missing barrier makes
a difference between the two. Only what kernels of ours contain is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad, Var

_LEAVES = (int, float, tirx.IntImm, tirx.FloatImm, tvm.ir.StringImm)


def is_barrier(statement: Any) -> bool:
    return (
        isinstance(statement, tirx.Evaluate)
        and isinstance(statement.value, Call)
        and getattr(statement.value.op, "name", "") == "tirx.tvm_storage_sync"
    )


def is_exchange(statement: Any) -> bool:
    return (
        isinstance(statement, tirx.BufferStore)
        and isinstance(statement.value, Call)
        and getattr(statement.value.op, "name", "") == "tirx.tvm_warp_shuffle_xor"
    )


def count_barriers(statement: Any) -> int:
    if is_barrier(statement) or is_exchange(statement):
        return 1
    return sum(count_barriers(part) for part in _parts(statement))


def _parts(statement: Any) -> Sequence[Any]:
    if isinstance(statement, tirx.SeqStmt):
        return list(statement.seq)
    if isinstance(statement, tirx.For | tirx.While | tirx.AttrStmt):
        return [statement.body]
    if isinstance(statement, tirx.IfThenElse):
        return [statement.then_case, *([statement.else_case] if statement.else_case is not None else [])]
    return []


class _Serial:
    def __init__(self, forwards: bool, drop_barriers: bool) -> None:
        self.forwards, self.drop_barriers = forwards, drop_barriers
        # Buffer -> the one in its place, and how its index changes.
        self.buffers: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}
        self.values: dict[Any, Any] = {}
        self.thread: Any = None
        self.turn: Any = None
        self.threads = 0
        self.seen: dict[int, tuple[Any, Any]] = {}

    # ------------------------------------------------------------------------------ expressions

    def expression(self, e: Any) -> Any:
        if isinstance(e, _LEAVES):
            return e
        if isinstance(e, Var):
            return self.values.get(e, e)
        known = self.seen.get(id(e))
        if known is not None:
            return known[1]
        if isinstance(e, TensorLoad):
            index = self.expression(e.indices[0])
            buffer, change = self.buffers.get(e.source, (e.source, lambda i: i))
            new = tirx.BufferLoad(buffer, [change(index)])
        elif isinstance(e, tirx.Ramp):
            new = tirx.Ramp(self.expression(e.base), e.stride, e.lanes)
        elif isinstance(e, tirx.Cast):
            new = tirx.Cast(str(e.ty.dtype), self.expression(e.value))
        elif isinstance(e, Call):
            new = Call(e.op, [self.expression(a) for a in e.args], ret_ty=e.ty)
        else:
            names = [f.name for f in type(e).__tvm_ffi_type_info__.fields]
            assert names
            assert all(n in ("a", "b", "condition", "true_value", "false_value") for n in names), (type(e), names)
            new = type(e)(*(self.expression(getattr(e, n)) for n in names))
        # The old expression is kept alive, so that its identity stays its own.
        self.seen[id(e)] = (e, new)
        return new

    # ------------------------------------------------------------------------------ statements

    def whole(self, s: Any) -> list[Any]:
        """A statement without barriers, or host code with launches in it."""
        if isinstance(s, tirx.SeqStmt):
            return [new for part in s.seq for new in self.whole(part)]
        if isinstance(s, tirx.AttrStmt):
            assert s.attr_key == "thread_extent", s.attr_key
            return [self.launch(s)]
        if isinstance(s, tirx.AllocBuffer):
            return [tirx.AllocBuffer(self.replace(s.buffer, 1))]
        if isinstance(s, tirx.Bind):
            return [tirx.Bind(s.var, self.expression(s.value))]
        if isinstance(s, tirx.BufferStore):
            buffer, change = self.buffers.get(s.buffer, (s.buffer, lambda i: i))
            return [tirx.BufferStore(buffer, self.expression(s.value), [change(self.expression(s.indices[0]))])]
        if isinstance(s, tirx.For):
            return [tirx.For(s.loop_var, s.min, s.extent, s.kind, _sequence(self.whole(s.body)))]
        if isinstance(s, tirx.While):
            return [tirx.While(self.expression(s.condition), _sequence(self.whole(s.body)))]
        if isinstance(s, tirx.IfThenElse):
            assert s.else_case is None
            return [tirx.IfThenElse(self.expression(s.condition), _sequence(self.whole(s.then_case)), None)]
        if is_barrier(s):
            return []
        assert isinstance(s, tirx.DeclBuffer | tirx.Evaluate), type(s)
        return [s]

    def replace(self, old: Any, places: int) -> Any:
        """Another buffer for `old`, in ordinary memory, with this many places for each of its elements, by thread."""
        shape = int(old.shape[0])
        new = tirx.decl_buffer((shape * places,), old.dtype, name=f"{old.name}_s")
        thread = self.thread
        self.buffers[old] = (new, (lambda i: i) if places == 1 else (lambda i: _behind(thread * shape, i)))
        return new

    def launch(self, s: Any) -> Any:
        inner = s.body
        assert isinstance(inner, tirx.AttrStmt)
        assert inner.node.thread_tag == "threadIdx.x"
        assert s.node.thread_tag == "blockIdx.x"
        # All loops over threads have this variable.
        self.turn, self.threads = tirx.Var("t", "int32"), int(inner.value)
        self.thread = self.turn if self.forwards else self.threads - 1 - self.turn
        self.values[inner.node.var] = self.thread
        kept: list[Any] = []
        statements = self.cut(inner.body, kept)
        return tirx.For(s.node.var, 0, int(s.value), tirx.ForKind.SERIAL, _sequence([*kept, *statements]))

    def cut(self, body: Any, kept: list[Any]) -> list[Any]:
        """The statements of a block with loops over its threads between the barriers. `kept` gets what lives across them."""
        done: list[Any] = []
        run: list[Any] = []

        def close() -> None:
            if run:
                done.append(tirx.For(self.turn, 0, self.threads, tirx.ForKind.SERIAL, _sequence(list(run))))
                run.clear()

        for part in list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]:
            if is_barrier(part):
                if not self.drop_barriers:
                    close()
            elif is_exchange(part):
                # All threads of the warp have the source, then each takes that of another one, then they go on.
                _, value, distance, width, _ = part.value.args
                assert int(width) == 32
                assert self.threads % 32 == 0, "an exchange with threads that are not there"
                assert value.source != part.buffer
                close()
                source, target = self.buffers[value.source][0], self.buffers[part.buffer][0]
                other = tirx.bitwise_xor(self.thread, distance)
                run.append(tirx.BufferStore(target, tirx.BufferLoad(source, [other]), [self.thread]))
                close()
            elif isinstance(part, tirx.AllocBuffer):
                shared = part.buffer.scope() == "shared"
                kept.append(tirx.AllocBuffer(self.replace(part.buffer, 1 if shared else self.threads)))
            elif isinstance(part, tirx.Bind):
                buffer = tirx.decl_buffer((self.threads,), str(part.value.ty.dtype), name=f"{part.var.name}_s")
                kept.append(tirx.AllocBuffer(buffer))
                run.append(tirx.BufferStore(buffer, self.expression(part.value), [self.thread]))
                self.values[part.var] = tirx.BufferLoad(buffer, [self.thread])
            elif count_barriers(part):
                assert isinstance(part, tirx.For), "a barrier that not all threads reach"
                close()
                done.append(
                    tirx.For(part.loop_var, part.min, part.extent, part.kind, _sequence(self.cut(part.body, kept)))
                )
            else:
                run += self.whole(part)
        close()
        return done


def _behind(start: Any, index: Any) -> Any:
    if isinstance(index, tirx.Ramp):
        return tirx.Ramp(start + index.base, index.stride, index.lanes)
    return start + index


def _sequence(statements: list[Any]) -> Any:
    if not statements:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def serial_function(function: Any, forwards: bool = True, drop_barriers: bool = False) -> Any:
    """A GPU kernel as a function for CPUs."""
    body = _sequence(_Serial(forwards, drop_barriers).whole(function.body))
    return tirx.PrimFunc(list(function.params), body, attrs=function.attrs)


def serial_module(module: Any, forwards: bool = True, drop_barriers: bool = False) -> Any:
    """Every kernel of a lowered module, for CPUs."""
    functions = {
        name: serial_function(f, forwards, drop_barriers) if isinstance(f, tirx.PrimFunc) else f
        for name, f in module.functions_items()
    }
    return tvm.IRModule(functions, attrs=module.attrs)
