"""Two hundred inputs that are wrong, the same in every run: bundles, data, checkpoints, cluster, training, plan and other files, and environments.

In: a folder with good files (`Good`). Out: for each case a command line, the environment it runs in, and the files it was given, made from the good
ones. Every case is wrong for certain: what is flipped, cut or replaced is what must be noticed. Bundles and checkpoints come twice: damaged, which hashes find, and
forged, with hashes that are right, so that what reads the contents is reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

DEEP = 100_000
COUNT = 200


@dataclass(frozen=True)
class Good:
    """Files that are right: a model, its training bundle for two ranks and one for inference, data, and a checkpoint."""

    model: Path
    bundle: Path
    forward: Path
    data: Path
    checkpoint: Path


@dataclass(frozen=True)
class Case:
    """`make` writes into a folder of its own and gives the words of the command line."""

    name: str
    make: Callable[[Path, Good], list[str]]
    environment: dict[str, str] = field(default_factory=dict)


def cases() -> list[Case]:
    found = [*_damaged_bundles(), *_forged_bundles(), *_data(), *_checkpoints(), *_clusters(), *_trainings(), *_others(), *_environments()]
    assert len({case.name for case in found}) == len(found)
    return found


# ------------------------------------------------------------------------------------------------ damage


def _truncated(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def _flipped(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def _longer(data: bytes, draw: random.Random) -> bytes:
    return data + b"\0" * draw.randrange(1, 99)


def _empty(data: bytes, draw: random.Random) -> bytes:
    return b""


def _replace(path: Path, how: str, draw: random.Random) -> None:
    """Something that is no such file in its place."""
    content = path.read_bytes()
    path.unlink()
    match how:
        case "missing":
            pass
        case "folder":
            path.mkdir()
        case "link":
            outside = path.parent.parent / f"outside-{path.name}"
            outside.write_bytes(content)
            path.symlink_to(outside)
        case "loop":
            path.symlink_to(path.name)
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")


_BYTES = {"cut": _truncated, "flipped": _flipped, "longer": _longer, "empty": _empty}
_PLACES = ("missing", "folder", "link", "loop", "pipe")


def _copy(source: Path, folder: Path) -> Path:
    target = folder / source.name
    shutil.copytree(source, target)
    return target


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


_READERS: dict[str, Callable[[Path, Path, Good], list[str]]] = {
    "run": lambda b, f, g: ["run", str(b), "--steps", "1"],
    "inspect": lambda b, f, g: ["inspect", str(b), "--memory"],
    "verify": lambda b, f, g: ["verify", str(b)],
    "simulate": lambda b, f, g: ["simulate", str(b)],
    "export": lambda b, f, g: ["export", str(b), "--safetensors", str(f / "out.safetensors")],
    "diff": lambda b, f, g: ["diff", str(g.bundle), str(b)],
    "infer": lambda b, f, g: ["infer", str(b), "--input", str(g.data), "--output", str(f / "y.npz")],
    "grade": lambda b, f, g: ["plan", str(b), "--grade", str(f / "metrics.jsonl")],
}


def _damaged_bundles() -> Iterator[Case]:
    draw = random.Random(1)
    commands = list(_READERS)
    for i in range(32):
        how = [*_BYTES, *_PLACES][i % 9]
        seed, command = draw.randrange(2**32), commands[i % len(commands)]

        def make(folder: Path, good: Good, how: str = how, seed: int = seed, command: str = command) -> list[str]:
            own = random.Random(seed)
            bundle = _copy(good.bundle, folder)
            path = own.choice(_files(bundle))
            if how in _BYTES:
                path.write_bytes(_BYTES[how](path.read_bytes(), own))
            else:
                _replace(path, how, own)
            return _READERS[command](bundle, folder, good)

        yield Case(f"bundle-{i}-{how}-{command}", make)
    for name, change in {
        "stray": lambda b: (b / "more.txt").write_text("x"),
        "up": lambda b: (b / "weights" / "up").symlink_to(".."),
        "none": shutil.rmtree,
        "file": lambda b: (shutil.rmtree(b), b.write_text("a bundle")),
    }.items():

        def make(folder: Path, good: Good, change: Any = change) -> list[str]:
            bundle = _copy(good.bundle, folder)
            change(bundle)
            return ["run", str(bundle)]

        yield Case(f"bundle-{name}", make)


# ------------------------------------------------------------------------------------------------ forgery


def _seal(bundle: Path, manifest: Any = None) -> None:
    """Right hashes for whatever stands in the files."""
    path = bundle / "manifest.json"
    if manifest is None:
        manifest = json.loads(path.read_bytes())
        for name, entry in manifest["files"].items():
            data = (bundle / name).read_bytes()
            entry |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode("utf-8", "surrogatepass")
    path.write_bytes(text)
    (bundle / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


_MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "list": lambda m: [m],
    "number": lambda m: b"17",
    "nothing": lambda m: b"",
    "text": lambda m: b"\xff\xfe\x00hello",
    "deep": lambda m: b'{"format":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "nan": lambda m: b'{"format": NaN}',
    "surrogate": lambda m: b'{"format": 1, "name": "\\ud800"}',
    "format": lambda m: m | {"format": 10**30},
    "format-text": lambda m: m | {"format": "1"},
    "no-ranks": lambda m: {k: v for k, v in m.items() if k != "ranks"},
    "ranks-empty": lambda m: m | {"ranks": []},
    "ranks-one": lambda m: m | {"ranks": m["ranks"][:1]},
    "ranks-turned": lambda m: m | {"ranks": m["ranks"][::-1]},
    "ranks-map": lambda m: m | {"ranks": {"0": m["ranks"][0]}},
    "more": lambda m: m | {"more": 1},
    "stage": lambda m: m | {"ranks": [r | {"stage": 7} for r in m["ranks"]]},
    "stage-negative": lambda m: m | {"ranks": [r | {"stage": -1} for r in m["ranks"]]},
    "threads": lambda m: m | {"ranks": [r | {"threads": 0} for r in m["ranks"]]},
    "threads-many": lambda m: m | {"ranks": [r | {"threads": 10**12} for r in m["ranks"]]},
    "threads-real": lambda m: m | {"ranks": [r | {"threads": 1.5} for r in m["ranks"]]},
    "device": lambda m: m | {"ranks": [r | {"device": "tpu:0"} for r in m["ranks"]]},
    "backend": lambda m: m | {"backend": "cobol"},
    "backend-path": lambda m: m | {"backend": "../../os"},
    "files-out": lambda m: m | {"files": m["files"] | {"../x": m["files"]["module.ir"]}},
    "files-root": lambda m: m | {"files": m["files"] | {"/etc/passwd": m["files"]["module.ir"]}},
    "files-nul": lambda m: m | {"files": m["files"] | {"a\0b": m["files"]["module.ir"]}},
    "no-module": lambda m: m | {"files": {k: v for k, v in m["files"].items() if k != "module.ir"}},
    "rank-files": lambda m: m | {"ranks": [r | {"files": ["nothing"]} for r in m["ranks"]]},
    "rank-no-files": lambda m: m | {"ranks": [r | {"files": []} for r in m["ranks"]]},
    "size": lambda m: m | {"files": {k: v | {"size": -1, "sha256": "0"} for k, v in m["files"].items()}},
}
_MODULES: dict[str, Callable[[str], bytes]] = {
    "cut": lambda t: t[: len(t) // 2].encode(),
    "empty": lambda t: b"",
    "bytes": lambda t: b"\xff\xfe" + t.encode(),
    "nul": lambda t: t.replace("module", "mod\0ule", 1).encode(),
    "huge": lambda t: t.replace("f32[", "f32[99999999999999999999999999,", 1).encode(),
    "negative": lambda t: t.replace("f32[", "f32[-3,", 1).encode(),
    "operation": lambda t: t.replace("= matmul(", "= frobnicate(", 1).encode(),
    "deep": lambda t: t.replace("schedule", f"note {'(' * DEEP}\n  schedule", 1).encode(),
    "no-schedule": lambda t: "\n".join(
        x for x in t.splitlines() if not x.lstrip().startswith(("schedule", "rank", "start", "batch"))
    ).encode(),
    "digits": lambda t: t.replace("microbatches ", "microbatches " + "9" * 5000, 1).encode(),
    "stage": lambda t: t.replace("stage 1 on", "stage 9 on", 1).encode(),
}


def _forged_bundles() -> Iterator[Case]:
    for name, change in _MANIFESTS.items():

        def make(folder: Path, good: Good, change: Any = change) -> list[str]:
            bundle = _copy(good.bundle, folder)
            _seal(bundle, change(json.loads((bundle / "manifest.json").read_bytes())))
            return ["run", str(bundle), "--steps", "1"]

        yield Case(f"manifest-{name}", make)
    for i, (name, alter) in enumerate(_MODULES.items()):
        # Looking at a module does not ask whether it can be run.
        known = ("verify",) if name in ("huge", "operation") else ("run", "inspect", "simulate", "verify", "diff")

        def make(folder: Path, good: Good, alter: Any = alter, command: str = known[i % len(known)]) -> list[str]:
            bundle = _copy(good.bundle, folder)
            path = bundle / "module.ir"
            before = path.read_text()
            path.write_bytes(alter(before))
            assert path.read_text(errors="replace") != before
            _seal(bundle)
            return _READERS[command](bundle, folder, good)

        yield Case(f"module-{name}", make)
    for name, (file, content, command) in {
        "plan-text": ("plan.json", b"not json", "grade"),
        "plan-list": ("plan.json", b"[1]", "grade"),
        "plan-deep": ("plan.json", b"[" * DEEP, "grade"),
        "plan-bytes": ("plan.json", b"\xff", "grade"),
        "names-text": ("source/names.json", b"{", "run"),
        "names-wrong": ("source/names.json", b'{"x": 7}', "run"),
        "reference-cut": ("reference.ir", b"module @x {", "verify"),
        "reference-bytes": ("reference.ir", b"\xff\xff", "verify"),
        "structure-text": ("source/model.onnx", b"not a model", "onnx"),
    }.items():

        def make(folder: Path, good: Good, file: str = file, content: bytes = content, command: str = command) -> list[str]:
            bundle = _copy(good.bundle, folder)
            (bundle / file).write_bytes(content)
            _seal(bundle)
            (folder / "metrics.jsonl").write_text('{"step": 0, "step_s": 0.1}\n' * 9)
            if command == "onnx":
                return ["export", str(bundle), "--onnx", str(folder / "out.onnx")]
            return _READERS[command](bundle, folder, good)

        yield Case(f"forged-{name}", make)


# ------------------------------------------------------------------------------------------------ data


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
    return _safetensors(json.dumps({"x": entry, "labels": {"dtype": "I64", "shape": [8], "data_offsets": [128, 192]}}).encode(), bytes(192))


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
    "header-negative": _as_zip({"x.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }"), "labels.npy": b""}),
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


def _data() -> Iterator[Case]:
    for name, write in _DATA.items():
        yield Case(f"data-{name}", lambda folder, good, write=write: ["run", str(good.bundle), "--data", str(write(folder))])
    for name in ("text", "header-huge", "header-negative", "missing", "header-code"):
        write = _DATA[name]
        yield Case(
            f"input-{name}",
            lambda folder, good, write=write: ["infer", str(good.forward), "--input", str(write(folder)), "--output", str(folder / "y")],
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
    "gone": shutil.rmtree,
    "list": _index(lambda i: [i]),
    "deep": _index(lambda i: b"[" * DEEP),
    "bytes": _index(lambda i: b"\xff\xff"),
    "format": _index(lambda i: i | {"format": "one"}),
    "step-negative": _index(lambda i: i | {"step": -1}),
    "step-huge": _index(lambda i: i | {"step": 10**40}),
    "step-real": _index(lambda i: i | {"step": 1.5}),
    "module": _index(lambda i: i | {"module": "another"}),
    "schedule": _index(lambda i: i | {"schedule": 7}),
    "microbatches": _index(lambda i: i | {"microbatches": 0}),
    "files-none": _index(lambda i: i | {"files": {}}),
    "files-out": _index(lambda i: i | {"files": {"../../x": next(iter(i["files"].values()))}}),
    "more": _index(lambda i: i | {"more": 1}),
    "types": _index(lambda i: i | {"files": {k: v | {"tensors": dict.fromkeys(v["tensors"], "q9[1]")} for k, v in i["files"].items()}}),
    "tables": _index(lambda i: i | {"tables": {"lr": "fast"}}),
}


def _checkpoints() -> Iterator[Case]:
    for name, change in _CHECKPOINTS.items():

        def make(folder: Path, good: Good, change: Any = change) -> list[str]:
            place = _copy(good.checkpoint, folder)
            change(next(path for path in place.iterdir() if path.name.startswith("step-")))
            return ["run", str(good.bundle), "--steps", "1", "--resume", str(place)]

        yield Case(f"checkpoint-{name}", make)
    for name in ("index-cut", "deep", "types", "step-negative", "files-none"):

        def make(folder: Path, good: Good, change: Any = _CHECKPOINTS[name]) -> list[str]:
            place = _copy(good.checkpoint, folder)
            change(next(path for path in place.iterdir() if path.name.startswith("step-")))
            return ["export", str(good.bundle), "--checkpoint", str(place), "--safetensors", str(folder / "out.safetensors")]

        yield Case(f"export-{name}", make)


# ------------------------------------------------------------------------------------------------ files of settings

_CLUSTERS: dict[str, tuple[str, bytes]] = {
    "missing": ("none.toml", b""),
    "empty": ("c.toml", b""),
    "bytes": ("c.toml", b"\xff\xfe"),
    "syntax": ("c.toml", b"[[device]"),
    "deep": ("c.toml", b"a = " + b"[" * DEEP + b"]" * DEEP),
    "number": ("c.toml", b'[[device]]\nname = "cpu:0"\nthreads = ' + b"9" * 5000),
    "date": ("c.toml", b"[[device]]\nname = 1979-05-27\n"),
    "nan": ("c.toml", b'[[device]]\nname = "cpu:0"\nflops = nan\n'),
    "infinite": ("c.toml", b'[[device]]\nname = "cpu:0"\nmemory = inf\n'),
    "unit": ("c.toml", b'[[device]]\nname = "cpu:0"\nmemory = "8 parsec"\n'),
    "exponent": ("c.toml", b'[[device]]\nname = "cpu:0"\nmemory = "1e999999999 GiB"\n'),
    "unknown": ("c.toml", b'[[device]]\nname = "cpu:0"\ncolour = "red"\n'),
    "twice": ("c.toml", b'[[device]]\nname = "cpu:0"\n[[device]]\nname = "cpu:0"\n'),
    "link": ("c.toml", b'[[device]]\nname = "cpu:0"\n[[link]]\na = "cpu:0"\nb = "cpu:7"\n'),
    "table": ("c.toml", b"device = 3\nlink = {}\n"),
    "yaml-syntax": ("c.yaml", b"device: [: : :"),
    "yaml-deep": ("c.yaml", b"[" * 20_000),
    "yaml-object": ("c.yaml", b"device: !!python/object/apply:os.getcwd []"),
    "yaml-bomb": ("c.yaml", b"a: &a [x,x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(20))),
    "yaml-anchor": ("c.yaml", b"&a [*a]"),
    "yaml-list": ("c.yaml", b"- 1\n- 2\n"),
}
_TRAININGS: dict[str, bytes] = {
    "empty": b"",
    "bytes": b"\xff",
    "syntax": b"loss = ",
    "deep": b"loss = " + b"[" * DEEP + b"]" * DEEP,
    "loss": b'loss = "sorrow"',
    "loss-number": b"loss = 3",
    "microbatches": b'loss = "cross_entropy"\nmicrobatches = -1',
    "microbatches-huge": b'loss = "cross_entropy"\nmicrobatches = 99999999999999999999',
    "clip": b'loss = "cross_entropy"\nclip = nan',
    "seed": b'loss = "cross_entropy"\nseed = -3',
    "unknown": b'loss = "cross_entropy"\nflavour = 1',
    "optimizer": b'loss = "cross_entropy"\n[optimizer]\nkind = "gradient_ascent"',
    "optimizer-lr": b'loss = "cross_entropy"\n[optimizer]\nkind = "sgd"\nlr = inf',
    "rate": b'loss = "cross_entropy"\n[rate]\nkind = "cosine"\nsteps = -1',
    "group": b'loss = "cross_entropy"\n[[group]]\npattern = "("',
    "group-list": b'loss = "cross_entropy"\ngroup = [1, 2]',
}


def _clusters() -> Iterator[Case]:
    for i, (name, (file, content)) in enumerate(_CLUSTERS.items()):

        def make(folder: Path, good: Good, file: str = file, content: bytes = content, simulate: bool = i % 3 == 2) -> list[str]:
            if not file.startswith("none"):
                (folder / file).write_bytes(content)
            words = ["simulate", str(good.bundle)] if simulate else ["plan", str(good.model), "--dim", "batch=2"]
            return [*words, "--cluster", str(folder / file)]

        yield Case(f"cluster-{name}", make)


def _trainings() -> Iterator[Case]:
    for name, content in _TRAININGS.items():
        yield Case(
            f"training-{name}",
            lambda folder, good, content=content: [
                "plan",
                str(good.model),
                "--dim",
                "batch=2",
                "--train",
                str(_as("t.toml", content)(folder)),
            ],
        )


_OTHERS: dict[str, tuple[bytes, list[str]]] = {
    "plan-text": (b"{", ["plan", "MODEL", "--dim", "batch=2", "--plan", "FILE"]),
    "plan-deep": (b"[" * DEEP, ["plan", "MODEL", "--dim", "batch=2", "--plan", "FILE"]),
    "plan-stages": (b'{"schedule": "forward", "microbatches": 1, "stages": [{"devices": [[]]}]}', ["plan", "MODEL", "--plan", "FILE"]),
    "plan-schedule": (b'{"schedule": [], "microbatches": 1, "stages": [{"devices": ["cpu:0"]}]}', ["plan", "MODEL", "--plan", "FILE"]),
    "plan-recompute": (b'{"schedule": "1f1b", "recompute": {}, "microbatches": 1, "stages": 1}', ["plan", "MODEL", "--plan", "FILE"]),
    "metrics-text": (b"hello\n", ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-bytes": (b"\xff\n", ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-nan": (b'{"step": 0, "step_s": NaN}\n' * 9, ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-list": (b"[1]\n" * 9, ["plan", "BUNDLE", "--grade", "FILE"]),
    "metrics-deep": (b"[" * DEEP + b"\n", ["plan", "BUNDLE", "--grade", "FILE"]),
    "workload-text": (b"[", ["plan", "--workload", "FILE"]),
    "workload-deep": (b"[" * DEEP, ["plan", "--workload", "FILE"]),
    "workload-empty": (b"{}", ["plan", "--workload", "FILE"]),
    "workload-nodes": (b'{"nodes": [1], "edges": {}, "maxSizePerFPGA": "x"}', ["plan", "--workload", "FILE"]),
    "ir-bytes": (b"\xff", ["inspect", "FILE"]),
    "ir-empty": (b"", ["opt", "FILE", "-p", "simplify"]),
    "ir-deep": (b"module @x {\n  note " + b"(" * DEEP + b"\n}\n", ["opt", "FILE", "-p", "simplify"]),
    "ir-pass": (b"module @x {\n}\n", ["opt", "FILE", "-p", "simplify{" * 5000]),
    "model-bytes": (b"\xff" * 50, ["plan", "FILE"]),
    "model-empty": (b"", ["verify", "FILE"]),
    "known": (b"\x93NUMPY", ["plan", "MODEL", "--dim", "batch=2", "--known", "x=FILE.npy"]),
    "numbers": (b"", ["run", "BUNDLE", "--lr", "nan", "--timeout", "nan"]),
    "numbers-rate": (b"", ["run", "BUNDLE", "--lr-schedule", "cosine{steps=" + "9" * 4000 + "}"]),
    "numbers-regex": (b"", ["plan", "MODEL", "--dim", "batch=2", "--frozen", "(" * 500]),
}


def _others() -> Iterator[Case]:
    for name, (content, words) in _OTHERS.items():

        def make(folder: Path, good: Good, content: bytes = content, words: list[str] = words) -> list[str]:
            (folder / "file").write_bytes(content)
            (folder / "file.npy").write_bytes(content)
            places = {"FILE": str(folder / "file"), "MODEL": str(good.model), "BUNDLE": str(good.bundle)}
            return [places.get(word, word.replace("FILE", str(folder / "file"))) for word in words]

        yield Case(f"file-{name}", make)


_GROUP = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_SETTINGS: list[dict[str, str]] = [
    {"RANK": "abc"}, {"RANK": ""}, {"RANK": "-1"}, {"RANK": "2"}, {"RANK": "9" * 5000}, {"RANK": "0.5"}, {"RANK": "٣"},
    {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "x"}, {"WORLD_SIZE": "3"}, {"WORLD_SIZE": "1e9"}, {"WORLD_SIZE": "9" * 30},
    {"MASTER_PORT": "x"}, {"MASTER_PORT": "0x10"}, {"MASTER_PORT": "99999999"}, {"MASTER_PORT": "-5"}, {"MASTER_PORT": ""},
    {"MASTER_ADDR": ""}, {"LOCAL_RANK": "abc"},
]  # fmt: skip


def _environments() -> Iterator[Case]:
    for i, change in enumerate(_SETTINGS):
        yield Case(f"group-{i}", lambda folder, good: ["run", str(good.bundle), "--steps", "1"], _GROUP | change)
    for i, change in enumerate([{"RANK": "abc"}, {"WORLD_SIZE": "x"}, {"MASTER_PORT": "x"}]):
        yield Case(f"doctor-{i}", lambda folder, good: ["doctor"], _GROUP | change)
    compile_words = ["--dim", "batch=2", "-o"]
    for i, change in enumerate([{"PENSTOCK_CACHE_SIZE": text} for text in ("lots", "-1", "nan", "9" * 5000, "1 parsec")]):
        yield Case(f"cache-{i}", lambda folder, good: ["compile", str(good.model), *compile_words, str(folder / "b")], change)
    yield Case(
        "dump", lambda folder, good: ["compile", str(good.model), *compile_words, str(folder / "b"), "--backend", "numpy"],
        {"PENSTOCK_DUMP": "/dev/null/x"},
    )  # fmt: skip
