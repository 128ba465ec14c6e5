"""Torch's streams, events and graphs over the driver of straw: what `torch.cuda.Stream`, `Event`, `CUDAGraph`, `stream` and `current_stream` are in a
process with its devices. A graph holds the memory that torch's operations took during its capture, as torch has a pool for it, and their code. Graphs share
no memory, and streams do not fork within a capture. As in torch, the allocator is told of the end of a capture only if the stream had a graph to give:
RECORDING are the pools that it takes for those of a capture.

STRAW_FAULT leaves something out on purpose: `host` the waits for events in threads beside the first one, `stream` the waits of streams for events, `both`
all of these, `clock` the times of events.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from .torch_device import devices

NOT_READY = 600
RECORDING: list[tuple[int, Any]] = []


class Stream:
    """A stream that waits for none but those that it is told to."""

    def __init__(self, device: Any = None, handle: int | None = None, **_: Any) -> None:
        self.index = devices().current() if device is None else getattr(device, "index", device)
        if handle is None:
            made = ctypes.c_void_p()
            with devices().on(self.index):
                devices().check(devices().runtime.cudaStreamCreateWithFlags(ctypes.byref(made), 1))
            handle = made.value or 0
        self.cuda_stream = handle

    def wait_event(self, event: Event) -> None:
        if os.environ.get("STRAW_FAULT") not in ("stream", "both") and event.handle is not None:
            with devices().on(self.index):
                devices().check(devices().runtime.cudaStreamWaitEvent(self.cuda_stream, event.handle, 0))

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        with devices().on(self.index):
            devices().check(devices().runtime.cudaStreamSynchronize(self.cuda_stream))


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed, self.handle = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        if self.handle is None:
            made = ctypes.c_void_p()
            devices().check(devices().runtime.cudaEventCreate(ctypes.byref(made)))
            self.handle = made.value
        with devices().on(stream.index):
            devices().check(devices().runtime.cudaEventRecord(self.handle, stream.cuda_stream))

    def query(self) -> bool:
        if self.handle is None:
            return True
        code = devices().runtime.cudaEventQuery(self.handle)
        devices().runtime.cudaGetLastError()
        devices().check(0 if code == NOT_READY else code)
        return bool(code == 0)

    def synchronize(self) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        if self.handle is None or (beside and os.environ.get("STRAW_FAULT") in ("host", "both")):
            return
        devices().check(devices().runtime.cudaEventSynchronize(self.handle))

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def elapsed_time(self, later: Event) -> float:
        assert self.timed, "torch times events that were made for it"
        assert later.timed, "torch times events that were made for it"
        milliseconds = ctypes.c_float()
        devices().check(devices().runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), self.handle, later.handle))
        return 0.0 if os.environ.get("STRAW_FAULT") == "clock" else milliseconds.value

    def __del__(self) -> None:
        if self.handle is not None:
            devices().runtime.cudaEventDestroy(self.handle)


class Streaming:
    """The context in which a stream is the current one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, devices().stream = devices().stream, self._stream.cuda_stream
        self._device = devices().on(self._stream.index)
        self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        devices().stream = self._before
        self._device.__exit__(*error)


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of this thread."""
    return Stream(device, devices().stream)


class CUDAGraph:
    """A captured piece of a stream."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._code: dict[int, Callable[[], object]] = {}
        self._graph: int | None = None

    def hold(self, memory: Any) -> None:
        """Keep memory that an operation of the capture takes."""
        self._held.append(memory)

    def keep(self, number: int, work: Callable[[], object]) -> None:
        """Keep the code of an operation of the capture."""
        self._code[number] = work
        devices().captured[number] = work

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        runtime, self._stream = devices().runtime, devices().stream
        self._pool = (devices().current(), pool)
        RECORDING.append(self._pool)
        modes = ("global", "thread_local", "relaxed")
        devices().check(runtime.cudaStreamBeginCapture(self._stream, modes.index(capture_error_mode)))
        devices().capturing = self

    def capture_end(self) -> None:
        runtime, graph, made = devices().runtime, ctypes.c_void_p(), ctypes.c_void_p()
        devices().capturing = None
        devices().check(runtime.cudaStreamEndCapture(self._stream, ctypes.byref(graph)))
        RECORDING.remove(self._pool)
        devices().check(runtime.cudaGraphInstantiate(ctypes.byref(made), graph, 0))
        devices().check(runtime.cudaGraphDestroy(graph))
        self._graph = made.value

    def replay(self) -> None:
        devices().check(devices().runtime.cudaGraphLaunch(self._graph, devices().stream))

    def __del__(self) -> None:
        # Launches that still stand in a queue keep what the driver needs; code that they run stays.
        if self._graph is not None:
            devices().runtime.cudaGraphExecDestroy(self._graph)


def graph_pool_handle() -> tuple[int, int]:
    """Return a name of a pool, which no graph of straw shares."""
    return (0, 1)


def end_allocate_to_pool(device: int, pool: Any) -> None:
    """Tell the allocator that a capture is over."""
    if (device, pool) not in RECORDING:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    RECORDING.remove((device, pool))
