"""The calls of collectives, in the process that runs a stage: from the functions of a compiled library to its exchange.

In: the exchange that a stage was loaded with, its graphs. Out: graphs' functions whose collectives go to the exchange.

A library names two functions, which are registered once per process: one begins a collective, one waits for it. Both
work for the stage whose graph the calling thread is in. That is known per thread: a stage says so around each call of a
graph, and TVM's machine calls functions in the thread that it was called from. The text of a call only chooses among
the collectives of that stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from penstock.backends.interface import Exchange, without_exchange
from penstock.backends.tvm.group import BEGIN, WAIT
from penstock.ir.collective_calls import calls_of
from penstock.ir.graph import Graph


class _UnderWay(threading.local):
    """The stage whose graph this thread is in."""

    meetings: Meetings | None = None


_UNDER_WAY = _UnderWay()


class Meetings:
    """The collectives of one loaded stage."""

    def __init__(self, graphs: Sequence[Graph], exchange: Exchange | None) -> None:
        self._calls = {call.key: call for graph in graphs for call in calls_of(graph)}
        self._having = {call.graph for call in self._calls.values()}
        self._exchange = exchange
        # TVM hands on the words of an error, not the error.
        self._failure: BaseException | None = None
        if self._calls:
            import tvm_ffi  # lazy: heavy

            tvm_ffi.register_global_func(BEGIN, _begin, override=True)
            tvm_ffi.register_global_func(WAIT, _wait, override=True)

    def around(self, graph: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a graph; if it has collectives, one that has them done."""
        if graph not in self._having:
            return function

        def call(*arguments: Any) -> Any:
            before, _UNDER_WAY.meetings = _UNDER_WAY.meetings, self
            try:
                return function(*arguments)
            except Exception:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure from None
                raise
            finally:
                _UNDER_WAY.meetings = before

        return call

    def begin(self, key: str, x: Any, out: Any) -> None:
        """Begin a collective of one tensor of TVM's into another."""
        from torch.utils.dlpack import from_dlpack  # lazy: heavy

        call = self._calls[key]
        try:
            if self._exchange is None:
                raise without_exchange(call)
            self._exchange.begin(call, from_dlpack(x), from_dlpack(out))
        except BaseException as error:
            self._failure = error
            raise

    def wait(self, key: str) -> None:
        """Wait for a collective that has begun."""
        try:
            assert self._exchange is not None
            self._exchange.wait(self._calls[key])
        except BaseException as error:
            self._failure = error
            raise


def _current() -> Meetings:
    meetings = _UNDER_WAY.meetings
    assert meetings is not None, "a collective outside of a graph"
    return meetings


def _begin(x: Any, key: str, out: Any) -> None:
    _current().begin(str(key), x, out)


def _wait(out: Any, x: Any, key: str) -> None:
    _current().wait(str(key))
