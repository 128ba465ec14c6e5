"""Forked processes for work that may crash, hang or take all memory: one process for each item.

In: items and a function from an item to text. Out: for each item in order the text, or how the process ended instead. A
process is killed after `seconds`, and may grow by `growth` bytes of address space over its size when it is forked.

Limit: fork copies the calling thread alone. Call this from a program that has started no threads: tests run one of
their own for it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

Item = TypeVar("Item")
ANSWERED, CRASHED, HUNG, MEMORY = "answered", "crashed", "hung", "memory"


@dataclass(frozen=True)
class Outcome:
    """The end of one item. `text` is the answer, or for a crash the signal or the exception."""

    ended: str
    text: str
    seconds: float


@dataclass
class _Child:
    """A running process."""

    index: int
    pid: int
    pipe: int
    began: float
    heard: bytearray


def each(
    work: Callable[[Item], str], items: Sequence[Item], *, seconds: float, growth: int, jobs: int = 1
) -> Iterator[tuple[int, Outcome]]:
    """Yield outcomes with the index of their item, in the order in which they end."""
    waiting = list(enumerate(items))[::-1]
    running: dict[int, _Child] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, item = waiting.pop()
                    child = _start(work, item, index, growth)
                    running[child.pipe] = child
                    selector.register(child.pipe, selectors.EVENT_READ)
                first = min(child.began for child in running.values()) + seconds
                ready = {key.fd for key, _ in selector.select(max(0.0, first - time.monotonic()))}
                for child in list(running.values()):
                    late = time.monotonic() - child.began > seconds
                    data = os.read(child.pipe, 1 << 16) if child.pipe in ready else b""
                    child.heard += data
                    if data or (child.pipe not in ready and not late):
                        continue
                    selector.unregister(child.pipe)
                    del running[child.pipe]
                    yield child.index, _end(child, late and child.pipe not in ready)
        finally:
            for child in running.values():
                _end(child, True)


def _start(work: Callable[[Item], str], item: Item, index: int, growth: int) -> _Child:
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _work(work, item, writes, growth)
    os.close(writes)
    return _Child(index, pid, reads, time.monotonic(), bytearray())


def _work(work: Callable[[Item], str], item: Item, writes: int, growth: int) -> NoReturn:
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + growth, size + growth))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            answer = ANSWERED + work(item)
        except MemoryError as error:
            answer = MEMORY + str(error)
        except BaseException as error:
            answer = f"{CRASHED}{type(error).__name__}: {error}"
        unwritten = answer.encode(errors="backslashreplace")
        while unwritten:
            unwritten = unwritten[os.write(writes, unwritten) :]
        code = 0
    finally:
        os._exit(code)


def _end(child: _Child, late: bool) -> Outcome:
    if late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    duration = time.monotonic() - child.began
    if late:
        return Outcome(HUNG, "", duration)
    code = os.waitstatus_to_exitcode(status)
    if code:
        return Outcome(CRASHED, signal.Signals(-code).name if code < 0 else f"exit code {code}", duration)
    answer = child.heard.decode()
    ended = next(word for word in (ANSWERED, MEMORY, CRASHED) if answer.startswith(word))
    return Outcome(ended, answer[len(ended) :], duration)
