"""Threads that call compiled code for the threads of a program.

TVM gives every thread that runs a parallel loop helpers of its own, and keeps them when the thread has ended. A program
that starts a thread per request would so collect helpers without end. Here calls go to threads that stay: as many as
there were calls at one time. One that waits for work costs nothing but its memory. The main thread stays anyhow, and
calls by itself: handing work over and waiting for it takes as long as a small model. In a forked process it is a
copy whose helpers are missing, so there it hands over, too.

In: a function, its arguments. Out: its result, or its error.

Limit: a caller that is interrupted waits for the end of its call, because the stage is busy until then.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple


class _Answer(NamedTuple):
    """A result, or the error in its place."""

    result: Any = None
    error: BaseException | None = None


class LastingThread:
    """A thread that calls what it is handed, one after the other, until the process ends."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stage", daemon=True).start()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._work.put((function, args))
        answer: _Answer | None = None
        interrupt: KeyboardInterrupt | None = None
        while answer is None:
            try:
                answer = self._answers.get()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if answer.error is not None:
            raise answer.error
        return answer.result

    def _run(self) -> None:
        while True:
            function, args = self._work.get()
            try:
                answer = _Answer(function(*args))
            except BaseException as error:  # raised again in the thread that waits
                answer = _Answer(error=error)
            self._answers.put(answer)
            # What a waiting thread held would be the memory of a caller.
            del function, args, answer


class _Threads(NamedTuple):
    """The threads of this process that wait for work, and the main thread, if it is the one the process began with."""

    idle: deque[LastingThread]
    main: list[threading.Thread]

    def forget(self) -> None:
        """Forget all threads: a forked process has none of them."""
        self.idle.clear()
        self.main.clear()


@cache
def _threads() -> _Threads:
    threads = _Threads(deque(), [threading.main_thread()])
    os.register_at_fork(after_in_child=threads.forget)
    return threads


def call_from_lasting_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, called from a thread that does not end."""
    idle, main = _threads()
    if threading.current_thread() in main:
        return function(*args)
    try:
        caller = idle.pop()
    except IndexError:
        caller = LastingThread()
    try:
        return caller.call(function, args)
    finally:
        idle.append(caller)
