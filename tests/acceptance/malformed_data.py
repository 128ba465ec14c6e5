"""Samples and checkpoints that are wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from acceptance.malformed_case import DEEP, Case, Good, copy_of


def _npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def _zipped(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _tensor(**change: object) -> bytes:
    entry = {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]} | change
    return _safetensors(
        json.dumps({"x": entry, "labels": {"dtype": "I64", "shape": [8], "data_offsets": [128, 192]}}).encode(),
        bytes(192),
    )


_X = {"x": np.zeros((8, 4), np.float32), "labels": np.zeros(8, np.int64)}


def _with(**change: Any) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        np.savez(path / "d.npz", **{k: v for k, v in (_X | change).items() if v is not None})
        return path / "d.npz"

    return write


def _as(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        (path / name).write_bytes(content)
        return path / name

    return write


def _as_zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        _zipped(path / "d.npz", members, compression)
        return path / "d.npz"

    return write


_HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000), }"
_DATA: dict[str, Callable[[Path], object]] = {
    "missing": lambda p: p / "none.npz",
    "folder-empty": lambda p: p,
    "pipe": lambda p: os.mkfifo(p / "d.npz") or p / "d.npz",
    "device": lambda p: "/dev/zero",
    "loop": lambda p: (p / "d.npz").symlink_to("d.npz") or p / "d.npz",
    "name-long": lambda p: p / ("x" * 5000),
    "name-nul": lambda p: "d\0.npz",
    "name-empty": lambda p: "",
    "text": _as("d.npz", b"hello"),
    "bytes": _as("d.dat", b"\xff" * 100),
    "no-dtype": _with(x=np.array([{}] * 8, dtype=object)),
    "strings": _with(x=np.array(["a"] * 8)),
    "complex": _with(x=np.zeros((8, 4), complex)),
    "fields": _with(x=np.zeros(8, [("a", "f4", 4)])),
    "dates": _with(labels=np.zeros(8, "M8[s]")),
    "narrow": _with(x=np.zeros((8, 3), np.float32)),
    "scalar": _with(x=np.float32(1)),
    "deep": _with(x=np.zeros((1,) * 20, np.float32)),
    "no-samples": _with(x=np.zeros((0, 4), np.float32), labels=np.zeros(0, np.int64)),
    "no-labels": _with(labels=None),
    "other-name": _with(more=np.zeros(8)),
    "other-count": _with(labels=np.zeros(7, np.int64)),
    "f64": _with(x=np.zeros((8, 4))),
    "header-huge": _as_zip({"x.npy": _npy(_HUGE), "labels.npy": _npy(_HUGE)}),
    "header-huge-packed": _as_zip({"x.npy": _npy(_HUGE), "labels.npy": _npy(_HUGE)}, zipfile.ZIP_DEFLATED),
    "header-negative": _as_zip(
        {"x.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }"), "labels.npy": b""}
    ),
    "header-code": _as_zip({"x.npy": _npy("__import__('os').getcwd()"), "labels.npy": b""}),
    "header-deep": _as_zip({"x.npy": _npy("[" * 9000), "labels.npy": b""}),
    "header-version": _as_zip({"x.npy": _npy(_HUGE, version=b"\x09\0"), "labels.npy": b""}),
    "zip-empty": _as_zip({}),
    "npy-cut": _as("x.npy", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (8, 4), }", bytes(100))),
    "npy-alone": _as("x.npy", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (8, 4), }", bytes(128))),
    "safetensors-length": _as("d.safetensors", _safetensors(b"{}", length=2**63)),
    "safetensors-deep": _as("d.safetensors", _safetensors(b'{"x":' + b"[" * DEEP + b"]" * DEEP + b"}")),
    "safetensors-list": _as("d.safetensors", _safetensors(b"[1, 2]")),
    "safetensors-offsets": _as("d.safetensors", _tensor(data_offsets=[-100, 28])),
    "safetensors-beyond": _as("d.safetensors", _tensor(shape=[8, 4000], data_offsets=[0, 128000])),
    "safetensors-shape": _as("d.safetensors", _tensor(shape=[-8, -4])),
    "safetensors-real": _as("d.safetensors", _tensor(shape=[8.0, 4.0])),
    "safetensors-dtype": _as("d.safetensors", _tensor(dtype="Q7")),
    "safetensors-cut": _as("d.safetensors", _tensor()[:-9]),
    "parquet-cut": _as("d.parquet", b"PAR1" + bytes(50)),
    "tokens": lambda p: f"{_as('t.bin', bytes(100))(p)}:u16",
    "twice": lambda p: f"x={_as('x.npy', b'')(p)},x={p}/x.npy",
    "options": lambda p: "x=,labels=",
}


def data() -> Iterator[Case]:
    for name, write in _DATA.items():
        yield Case(
            f"data-{name}", lambda folder, good, write=write: ["run", str(good.bundle), "--data", str(write(folder))]
        )
    for name in ("text", "header-huge", "header-negative", "missing", "header-code"):
        write = _DATA[name]
        yield Case(
            f"input-{name}",
            lambda folder, good, write=write: [
                "infer",
                str(good.forward),
                "--input",
                str(write(folder)),
                "--output",
                str(folder / "y"),
            ],
        )


# ------------------------------------------------------------------------------------------------ checkpoints


def _index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(checkpoint: Path) -> None:
        path = checkpoint / "index.json"
        found = change(json.loads(path.read_bytes()))
        text = found if isinstance(found, bytes) else json.dumps(found).encode()
        path.write_bytes(text)
        (checkpoint / "index.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  index.json\n")

    return write


_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "index-cut": lambda c: (c / "index.json").write_bytes((c / "index.json").read_bytes()[:50]),
    "index-missing": lambda c: (c / "index.json").unlink(),
    "index-folder": lambda c: ((c / "index.json").unlink(), (c / "index.json").mkdir()),
    "hash-missing": lambda c: (c / "index.sha256").unlink(),
    "latest-bytes": lambda c: (c.parent / "latest").write_bytes(b"\xff\0../.."),
    "latest-out": lambda c: (c.parent / "latest").write_text("../../etc"),
    "index-pipe": lambda c: ((c / "index.json").unlink(), os.mkfifo(c / "index.json")),
    "hash-pipe": lambda c: ((c / "index.sha256").unlink(), os.mkfifo(c / "index.sha256")),
    "latest-pipe": lambda c: ((c.parent / "latest").unlink(), os.mkfifo(c.parent / "latest")),
    "gone": shutil.rmtree,
    "list": _index(lambda i: [i]),
    "deep": _index(lambda i: b"[" * DEEP),
    "bytes": _index(lambda i: b"\xff\xff"),
    "format": _index(lambda i: i | {"format": "one"}),
    "step-negative": _index(lambda i: i | {"step": -1}),
    "step-huge": _index(lambda i: i | {"step": 10**40}),
    "step-later": _index(lambda i: i | {"step": i["step"] + 1}),
    "step-earlier": _index(lambda i: i | {"step": i["step"] - 1}),
    "step-real": _index(lambda i: i | {"step": 1.5}),
    "module": _index(lambda i: i | {"module": "another"}),
    "schedule": _index(lambda i: i | {"schedule": 7}),
    "microbatches": _index(lambda i: i | {"microbatches": 0}),
    "files-none": _index(lambda i: i | {"files": {}}),
    "files-out": _index(lambda i: i | {"files": {"../../x": next(iter(i["files"].values()))}}),
    "more": _index(lambda i: i | {"more": 1}),
    "types": _index(
        lambda i: (
            i | {"files": {k: v | {"tensors": dict.fromkeys(v["tensors"], "q9[1]")} for k, v in i["files"].items()}}
        )
    ),
    "tables": _index(lambda i: i | {"tables": {"lr": "fast"}}),
}


def checkpoints() -> Iterator[Case]:
    for name, change in _CHECKPOINTS.items():

        def make(folder: Path, good: Good, change: Any = change) -> list[str]:
            place = copy_of(good.checkpoint, folder)
            change(next(path for path in place.iterdir() if path.name.startswith("step-")))
            return ["run", str(good.bundle), "--steps", "1", "--resume", str(place)]

        yield Case(f"checkpoint-{name}", make)
    for name in ("index-cut", "deep", "types", "step-negative", "files-none"):

        def make(folder: Path, good: Good, change: Any = _CHECKPOINTS[name]) -> list[str]:
            place = copy_of(good.checkpoint, folder)
            change(next(path for path in place.iterdir() if path.name.startswith("step-")))
            return [
                "export",
                str(good.bundle),
                "--checkpoint",
                str(place),
                "--safetensors",
                str(folder / "out.safetensors"),
            ]

        yield Case(f"export-{name}", make)
