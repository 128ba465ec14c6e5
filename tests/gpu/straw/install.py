"""Torch's functions for CUDA, over the driver of straw. In: the libraries. Out: torch in this process says that it has devices, and makes tensors on them.

Only what the product asks of torch is there. Nothing of the product is changed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import uuid
import weakref
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import exchange, libraries, streams, torch_device
from .torch_device import Devices, DeviceTensor, devices, is_pinned


class _Current:
    """The context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)
        self._context: Any = None

    def __enter__(self) -> None:
        self._context = devices().on(self._index)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def index_of(device: Any) -> int:
    """Return the number of a device, given as torch takes it."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return devices().current() if index is None else index


def _properties(device: Any = None) -> SimpleNamespace:
    index = index_of(device)
    major, minor = _capability()
    return SimpleNamespace(name="Straw", uuid=uuid.UUID(int=index + 1), major=major, minor=minor, total_memory=1 << 32)


def _capability(device: Any = None) -> tuple[int, int]:
    return divmod(int(os.environ.get("STRAW_CAPABILITY", "90")), 10)


def _memory(device: Any = None) -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with devices().on(index_of(device)):
        devices().check(devices().runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
    return free.value, total.value


def _synchronize(device: Any = None) -> None:
    with devices().on(index_of(device)):
        devices().check(devices().runtime.cudaDeviceSynchronize())


def _pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in pinned memory."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    address = devices().allocate(max(nbytes, 1), -1)
    memory = (ctypes.c_char * max(nbytes, 1)).from_address(address)
    weakref.finalize(memory, devices().runtime.cudaFreeHost, address)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(dtype).view(shape)


def _fill(made: DeviceTensor, like: torch.Tensor) -> None:
    """Fill a tensor by a kernel: no memory of the host is read."""
    target = made.held
    devices().queue("fill", [made], lambda: target.copy_(like))


def _factory(before: Callable[..., Any], finish: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a function of torch that makes tensors. `finish` fills one that lies on a device."""

    @wraps(before)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            like = before(*args, **options)
            made = devices().empty(like.shape, like.dtype, index_of(device))
            if finish and like.numel():
                finish(made, like)
            return made
        if pin_memory:
            like = before(*args, **options)
            return _pinned(like.shape, like.dtype).copy_(like)
        return before(*args, device=device, **options)

    return make


def _to(before: Callable[..., Any], self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    given = [options["device"]] if "device" in options else [a for a in args if isinstance(a, (torch.device, str))]
    others = {k: v for k, v in options.items() if k not in ("device", "non_blocking")}
    rest = [a for a in args if not isinstance(a, (torch.device, str, bool))]
    late = options.get("non_blocking", any(a is True for a in args))
    target = torch.device(given[0]) if given else self.device
    source = before(self, *rest, **others) if rest or others else self
    if target.type == "cuda" and (source.device.type, source.device.index) != (target.type, index_of(target)):
        return devices().empty(source.shape, source.dtype, index_of(target)).copy_(source, non_blocking=late)
    if target.type == "cpu" and isinstance(source, DeviceTensor):
        return torch.empty(source.shape, dtype=source.dtype).copy_(source, non_blocking=late)
    return source


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        return torch.tensor(data, dtype=dtype, device=device)
    moved = data if device is None else data.to(device)
    return moved if dtype is None else moved.to(dtype)


def install(folder: Path) -> Devices:
    """Load the libraries in a folder, and let torch have their devices."""
    if torch_device.installed():
        return devices()
    runtime = libraries.load(folder)
    state = Devices(runtime)
    torch_device.put(state)
    exchange.offer()
    count = int(os.environ.get("STRAW_DEVICES", "1"))
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": state.current,
        "get_device_properties": _properties,
        "get_device_capability": _capability,
        "get_device_name": lambda device=None: "Straw",
        "mem_get_info": _memory,
        "init": lambda: None,
        "device": _Current,
        "synchronize": _synchronize,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.Streaming,
        "current_stream": streams.current_stream,
        "CUDAGraph": streams.CUDAGraph,
        "graph_pool_handle": streams.graph_pool_handle,
        "cudart": lambda: runtime,
        "can_device_access_peer": lambda device, other: True,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_endAllocateToPool = streams.end_allocate_to_pool
    torch._C._cuda_releasePool = lambda device, pool: None
    for name, finish in (
        ("empty", None),
        ("zeros", _fill),
        ("ones", _fill),
        ("full", _fill),
        ("randn", _fill),
        ("tensor", torch.Tensor.copy_),
    ):
        setattr(torch, name, _factory(getattr(torch, name), finish))
    torch.as_tensor = _as_tensor  # type: ignore[assignment]
    torch.version.cuda = "13.0"
    before = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **options: _to(before, self, *args, **options)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, device=None: _pinned(self.shape, self.dtype).copy_(self)  # type: ignore[method-assign]
    torch.Tensor.is_pinned = lambda self, device=None: is_pinned(self)  # type: ignore[method-assign]
    torch.utils.dlpack.from_dlpack = partial(exchange.from_dlpack, before=torch.utils.dlpack.from_dlpack)
    end = os._exit

    def exit_with_log(code: int) -> None:
        # Ranks end so, without anything that runs at the end of a process.
        runtime.straw_end()
        end(code)

    os._exit = exit_with_log  # type: ignore[assignment]
    atexit.register(runtime.straw_end)
    return state
