"""The exchange of tensors between torch's stand-in for devices and TVM, by DLPack's functions for Python objects.

In: DeviceTensors that go to TVM, tensors of TVM that come back. Out: the same memory on the other side. `offer` gives the class of tensors the table of
functions that torch's own tensors have; TVM asks it for the current stream, too.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from .torch_device import DeviceTensor, devices

CUDA = 2
_DTYPES = {
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
}
_TORCH = {code: dtype for dtype, code in _DTYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_TO_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_FILL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Tensor))
_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Functions(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("from_object", _FROM_OBJECT),
        ("to_object", _TO_OBJECT),
        ("fill", _FILL),
        ("stream", _STREAM),
    ]


# Tensors that TVM holds, by the address of their description.
_LENT: dict[int, tuple[Any, ...]] = {}


def _describe(x: DeviceTensor, out: _Tensor) -> tuple[Any, ...]:
    shape, strides = (ctypes.c_int64 * x.ndim)(*x.shape), (ctypes.c_int64 * x.ndim)(*x.stride())
    out.data, out.device_type, out.device_id, out.ndim = x.data_ptr(), CUDA, x.index, x.ndim
    (out.code, out.bits), out.lanes = _DTYPES[x.dtype], 1
    out.shape, out.strides, out.byte_offset = shape, strides, 0
    return shape, strides


def _from_object(address: int, out: Any) -> int:
    x = ctypes.cast(address, ctypes.py_object).value
    managed = _Managed(1, 1, None, ctypes.cast(_give_back, ctypes.c_void_p).value, 0)
    arrays = _describe(x, managed.tensor)
    place = ctypes.addressof(managed)
    _LENT[place] = (managed, x, arrays)
    out[0] = place
    return 0


@_DELETER
def _give_back(place: int) -> None:
    _LENT.pop(place)


def _to_object(place: int, out: Any) -> int:
    x = taken(place)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
    out[0] = id(x)
    return 0


def taken(place: int) -> torch.Tensor:
    """Return a tensor over the memory of a managed tensor of DLPack, which is given back when no tensor has it."""
    managed = _Managed.from_address(place)
    t = managed.tensor
    assert t.device_type == CUDA, f"a tensor on a device of kind {t.device_type}"
    shape, dtype = list(t.shape[: t.ndim]), _TORCH[t.code, t.bits]
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    owner = _Lender()
    weakref.finalize(owner, _DELETER(managed.deleter), place)
    memory = (ctypes.c_char * nbytes).from_address(t.data + t.byte_offset) if nbytes else None
    flat = torch.empty(0, dtype=torch.uint8) if memory is None else torch.frombuffer(memory, dtype=torch.uint8)
    return DeviceTensor(flat.view(dtype).view(shape), owner, t.device_id)


class _Lender:
    """The other side's hold of a tensor that was taken."""


def _fill(address: int, out: Any) -> int:
    x = ctypes.cast(address, ctypes.py_object).value
    x._described = _describe(x, out[0])
    return 0


def _stream(_: int, __: int, out: Any) -> int:
    out[0] = devices().stream or None
    return 0


_FUNCTIONS = _Functions(
    1, 1, None, None, _FROM_OBJECT(_from_object), _TO_OBJECT(_to_object), _FILL(_fill), _STREAM(_stream)
)
_NAME = b"dlpack_exchange_api"


def offer() -> None:
    """Give the class of tensors the table of functions."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    DeviceTensor.__dlpack_c_exchange_api__ = make(ctypes.addressof(_FUNCTIONS), _NAME, None)


def from_dlpack(x: Any, before: Any) -> torch.Tensor:
    """Return torch's view of a tensor of TVM; `before` is torch's own function, for those on the processor."""
    if x.__dlpack_device__()[0] != CUDA:
        return before(x)
    capsule = x.__dlpack__(max_version=(1, 1))
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    place = read(capsule, b"dltensor_versioned")
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    rename(capsule, _USED)
    return taken(place)


_USED = b"used_dltensor_versioned"
