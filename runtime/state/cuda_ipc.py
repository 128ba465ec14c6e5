"""Memory of a GPU, and events, that two processes of one host share, by functions of CUDA's runtime library.

In: a size, or a handle of another process. Out: addresses in the memory of a GPU, events. A handle is 64 bytes that may
go through a socket. The process that made something keeps it; the other one opens it once.

Torch's allocator cuts its memory out of larger blocks, and may give it back. So this memory is taken from the driver.
It stays until the process ends.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

HANDLE_BYTES = 64
_DEFAULT_COPY, _PEER_ACCESS = 4, 1
# An event without times, which other processes may open.
_SHARED_EVENT = 2 | 4
_Pointer = ctypes.c_void_p


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * HANDLE_BYTES)]


@cache
def _runtime() -> ctypes.CDLL:
    """Return the runtime library that torch has loaded."""
    version = torch.version.cuda
    assert version is not None, "torch is built without CUDA"
    library = ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaMalloc.argtypes = [_Pointer, ctypes.c_size_t]
    library.cudaIpcGetMemHandle.argtypes = [_Pointer, _Pointer]
    library.cudaIpcOpenMemHandle.argtypes = [_Pointer, _Handle, ctypes.c_uint]
    library.cudaEventCreateWithFlags.argtypes = [_Pointer, ctypes.c_uint]
    library.cudaIpcGetEventHandle.argtypes = [_Pointer, _Pointer]
    library.cudaIpcOpenEventHandle.argtypes = [_Pointer, _Handle]
    library.cudaEventRecord.argtypes = [_Pointer, _Pointer]
    library.cudaStreamWaitEvent.argtypes = [_Pointer, _Pointer, ctypes.c_uint]
    library.cudaMemcpyAsync.argtypes = [_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_int, _Pointer]
    return library


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error: {_runtime().cudaGetErrorString(code).decode()}")


class SharedEvent:
    """An event of this process or of another one. The process that made it records it, the other one waits for it."""

    def __init__(self, handle: bytes | None = None) -> None:
        event = _Pointer()
        if handle is None:
            _check(_runtime().cudaEventCreateWithFlags(ctypes.byref(event), _SHARED_EVENT))
        else:
            _check(_runtime().cudaIpcOpenEventHandle(ctypes.byref(event), _handle_of(handle)))
        self._event = event

    def handle(self) -> bytes:
        """Return the handle by which another process opens it."""
        handle = _Handle()
        _check(_runtime().cudaIpcGetEventHandle(ctypes.byref(handle), self._event))
        return bytes(handle)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Put it behind what a stream was told to do."""
        _check(_runtime().cudaEventRecord(self._event, stream.cuda_stream))

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for what it was last put behind."""
        _check(_runtime().cudaStreamWaitEvent(stream.cuda_stream, self._event, 0))


def take_memory(nbytes: int) -> tuple[int, bytes]:
    """Return the address of new memory on the current device, and its handle."""
    address, handle = _Pointer(), _Handle()
    _check(_runtime().cudaMalloc(ctypes.byref(address), nbytes))
    _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), address))
    return address.value or 0, bytes(handle)


def open_memory(handle: bytes) -> int:
    """Return the address of another process's memory."""
    address = _Pointer()
    _check(_runtime().cudaIpcOpenMemHandle(ctypes.byref(address), _handle_of(handle), _PEER_ACCESS))
    return address.value or 0


def copy(to: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Copy bytes between addresses of GPUs, when a stream gets there."""
    _check(_runtime().cudaMemcpyAsync(to, source, nbytes, _DEFAULT_COPY, stream.cuda_stream))


def _handle_of(handle: bytes) -> _Handle:
    return _Handle.from_buffer_copy(handle)
