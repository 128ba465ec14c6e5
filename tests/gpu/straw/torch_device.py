"""Torch tensors on devices of straw, where torch has no CUDA: `install()` puts them where the product asks torch for CUDA.

A DeviceTensor says that it is on `cuda:0`, and has memory of the driver of straw. Operations of torch on it are queued on the current stream, and done by
torch's code for processors when the stream is waited for. Views are made at once. A copy to or from the host waits, unless the host's memory is pinned and
the caller said `non_blocking`. TVM takes and gives these tensors as it does with torch's own on a GPU: through DLPack's exchange functions, with the
current stream.

Limits: only what the product uses of `torch.cuda` and of torch's ways to make tensors is there, and one stream at a time for each thread.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .kernels import IN_PLACE, KERNELS

if TYPE_CHECKING:
    from .streams import CUDAGraph

_ADDRESS = ctypes.c_void_p
_CALLBACK = ctypes.CFUNCTYPE(None, _ADDRESS)


class Memory:
    """A block of the device, freed behind what its stream does, when no tensor lies in it any more."""

    def __init__(self, device: Devices, nbytes: int, index: int) -> None:
        self.address = device.allocate(nbytes, index)
        stream = device.stream
        weakref.finalize(self, device.runtime.straw_free_later, self.address, stream, index)


class DeviceTensor(torch.Tensor):
    """A tensor of a device of straw. `held` is a tensor of the processor over the same memory, `owner` keeps that alive."""

    held: torch.Tensor
    owner: Any
    index: int

    @staticmethod
    def __new__(cls, held: torch.Tensor, owner: Any, index: int) -> DeviceTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        self.held, self.owner, self.index = held, owner, index
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.held.data_ptr() if self.held.numel() else 0

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return devices().to_host(self)

    def item(self) -> Any:
        return self.cpu().item()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"DeviceTensor({self.dtype}, {list(self.shape)}, {self.device})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.where:
            # Torch makes a tensor of a number where it believes the others to be: on no device that computes.
            args = tuple(torch.tensor(x, dtype=_like(args)) if isinstance(x, int | float) else x for x in args)
        return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return devices().perform(function, args, kwargs or {})


class Devices:
    """The devices of a process, and its current device and stream."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self.runtime = runtime
        self._state = threading.local()
        self._waiting: dict[int, Callable[[], object]] = {}
        self._numbers, self._callback = itertools.count(1), _CALLBACK(self._run)
        runtime.straw_queue.argtypes = [_ADDRESS, ctypes.c_char_p, _CALLBACK, _ADDRESS, ctypes.c_int, _ADDRESS]
        self.failures: list[BaseException] = []
        # The code of operations in graphs, by number.
        self.captured: dict[int, Callable[[], object]] = {}
        # A fault that tests ask for: no copy to the host waits.
        self.waits = True

    @property
    def stream(self) -> int:
        return int(getattr(self._state, "stream", 0))

    @stream.setter
    def stream(self, handle: int) -> None:
        self._state.stream = handle

    @property
    def capturing(self) -> CUDAGraph | None:
        """The capture of this thread that is under way."""
        return getattr(self._state, "capturing", None)

    @capturing.setter
    def capturing(self, graph: CUDAGraph | None) -> None:
        self._state.capturing = graph

    def check(self, code: int) -> None:
        """Raise the error of a function of the runtime."""
        if self.failures:
            raise self.failures.pop(0)
        if code:
            words = self.runtime.cudaGetErrorString(code).decode()
            self.runtime.cudaGetLastError()
            raise RuntimeError(f"CUDA error: {words}")

    def current(self) -> int:
        index = ctypes.c_int()
        self.runtime.cudaGetDevice(ctypes.byref(index))
        return index.value

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        before = self.current()
        self.check(self.runtime.cudaSetDevice(index))
        try:
            yield
        finally:
            self.runtime.cudaSetDevice(before)

    def allocate(self, nbytes: int, index: int) -> int:
        address = ctypes.c_void_p()
        self.check(self.runtime.straw_allocate(ctypes.byref(address), nbytes, index))
        return address.value or 0

    def queue(self, what: str, tensors: Sequence[DeviceTensor], work: Callable[[], object]) -> None:
        """Queue work of torch, which touches some tensors, on the current stream."""
        number = next(self._numbers)
        if self.capturing is None:
            self._waiting[number] = work
        else:
            self.capturing.keep(number, work)
        pointers = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
        with self.on(tensors[0].index):
            self.check(
                self.runtime.straw_queue(self.stream, what.encode(), self._callback, number, len(tensors), pointers)
            )

    def _run(self, number: int) -> None:
        try:
            work = self._waiting.pop(number, None) or self.captured[number]
            work()
        except BaseException as error:  # raised by the next wait
            self.failures.append(error)

    def wait(self, index: int) -> None:
        """Wait for the current stream."""
        if self.waits:
            with self.on(index):
                self.check(self.runtime.cudaStreamSynchronize(self.stream))

    def empty(self, shape: Any, dtype: torch.dtype, index: int, strides: Any = None) -> DeviceTensor:
        meta = (
            torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            if strides
            else torch.empty(shape, dtype=dtype, device="meta")
        )
        nbytes = meta.untyped_storage().nbytes()
        memory = Memory(self, max(nbytes, 1), index)
        if self.capturing is not None:
            self.capturing.hold(memory)
        flat = torch.frombuffer((ctypes.c_char * max(nbytes, 1)).from_address(memory.address), dtype=torch.uint8)
        held = flat[:nbytes].view(dtype).as_strided(meta.shape, meta.stride())
        return DeviceTensor(held, memory, index)

    def to_host(self, x: DeviceTensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype).copy_(x)

    def perform(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation of torch: views at once, everything else behind what was queued."""
        aten = torch.ops.aten
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
        if function is aten.copy_.default:
            return self._copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if function is aten._local_scalar_dense.default:
            return self.to_host(tensors[0]).item()
        index = tensors[0].index
        if any(x.index != index for x in tensors):
            raise RuntimeError(f"{function}: tensors on different devices")
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")}
        # What is queued holds the memory's address alone: memory that is freed too early is noticed.
        inputs, options = tree_map(_held, args), tree_map(_held, kwargs)
        if function.is_view:
            views = function(*inputs, **options)
            return tree_map(
                lambda x: DeviceTensor(x, tensors[0].owner, index) if isinstance(x, torch.Tensor) else x, views
            )
        changed = [
            kwargs[a.name] if a.kwarg_only else args[i]
            for i, a in enumerate(function._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if changed:
            kernel = IN_PLACE.get(function, function)
            self.queue(str(function), tensors, lambda: kernel(*inputs, **options))
            return changed[0] if len(changed) == 1 else tuple(changed)
        metas = function(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        made = tree_map(
            lambda m: self.empty(m.shape, m.dtype, index, m.stride()) if isinstance(m, torch.Tensor) else m, metas
        )
        outs = [x for x in tree_leaves(made) if isinstance(x, DeviceTensor)]
        targets = [x.held for x in outs]

        kernel = KERNELS.get(function, function)

        def work() -> None:
            results = [x for x in tree_leaves(kernel(*inputs, **options)) if isinstance(x, torch.Tensor)]
            for target, result in zip(targets, results, strict=kernel is function):
                target.copy_(result)

        if "empty" not in function._schema.name:
            self.queue(str(function), [*tensors, *outs], work)
        return made

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        on_device = [x for x in (to, source) if isinstance(x, DeviceTensor)]
        target, origin = _held(to), _held(source)
        if len(on_device) == 2 and to.data_ptr() == source.data_ptr() and to.is_contiguous() and source.is_contiguous():
            # Products of folded operands write into a view of their result, and copy that onto itself.
            return to
        if len(on_device) == 2:
            # A copy between devices is in the stream of the source.
            touched = on_device if to.index == source.index else [source]
            self.queue("copy", touched, lambda: target.copy_(origin))
            return to
        late = non_blocking and is_pinned(to if origin is not source else source)
        if origin is source and not late:
            # Pageable memory is taken over before the call returns.
            origin = source.clone()
        self.queue("copy", on_device, lambda: target.copy_(origin))
        if not late:
            self.wait(on_device[0].index)
        return to


def _held(x: Any) -> Any:
    return x.held if isinstance(x, DeviceTensor) else x


def _like(args: Sequence[Any]) -> torch.dtype:
    """Return the type of the tensor that a number is chosen beside."""
    (other,) = (x for x in args[1:] if isinstance(x, torch.Tensor))
    return other.dtype


def _meta(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def is_pinned(x: torch.Tensor) -> bool:
    """Return whether a tensor of the processor lies in pinned memory."""
    return bool(devices().runtime.straw_is_pinned(x.data_ptr()))


_DEVICES: list[Devices] = []


def devices() -> Devices:
    """Return the devices that were installed."""
    return _DEVICES[0]


def installed() -> bool:
    """Return whether this process has devices."""
    return bool(_DEVICES)


def put(state: Devices) -> None:
    """Install the devices of this process."""
    _DEVICES[:] = [state]
