"""Malformed bundles. Damaged ones have wrong hashes. Forged ones have right hashes, so that they reach the readers of
the contents."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from acceptance.malformed_case import DEEP, Case, Good, copy_of

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


def damaged_bundles() -> Iterator[Case]:
    draw = random.Random(1)
    commands = list(_READERS)
    for i in range(32):
        how = [*_BYTES, *_PLACES][i % 9]
        seed, command = draw.randrange(2**32), commands[i % len(commands)]

        def make(folder: Path, good: Good, how: str = how, seed: int = seed, command: str = command) -> list[str]:
            own = random.Random(seed)
            bundle = copy_of(good.bundle, folder)
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
            bundle = copy_of(good.bundle, folder)
            change(bundle)
            return ["run", str(bundle)]

        yield Case(f"bundle-{name}", make)


# ------------------------------------------------------------------------------------------------ forgery


def seal(bundle: Path, manifest: Any = None) -> None:
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


# Numbers that a program would count up to, and places that are not there.
_SIMULATED: dict[str, tuple[str, str]] = {
    "threads": ("threads=1 ", "threads=1000000000000 "),
    "stage": ("stage 1 on", "stage 1000000000000 on"),
    "edge": ("edge 0>1", "edge 0>7"),
}


def forged_bundles() -> Iterator[Case]:
    for name, (before, after) in _SIMULATED.items():
        for command in ("simulate", "opt"):

            def make(
                folder: Path, good: Good, before: str = before, after: str = after, command: str = command
            ) -> list[str]:
                text = (good.bundle / "module.ir").read_text()
                assert before in text
                (folder / "m.ir").write_text(text.replace(before, after, 1))
                return [command, str(folder / "m.ir"), *(["-p", "lifetimes"] if command == "opt" else [])]

            yield Case(f"numbers-{name}-{command}", make)
    for name, change in _MANIFESTS.items():

        def make(folder: Path, good: Good, change: Any = change) -> list[str]:
            bundle = copy_of(good.bundle, folder)
            seal(bundle, change(json.loads((bundle / "manifest.json").read_bytes())))
            return ["run", str(bundle), "--steps", "1"]

        yield Case(f"manifest-{name}", make)
    for i, (name, alter) in enumerate(_MODULES.items()):
        # Looking at a module does not ask whether it can be run.
        known = ("verify",) if name in ("huge", "operation") else ("run", "inspect", "simulate", "verify", "diff")

        def make(folder: Path, good: Good, alter: Any = alter, command: str = known[i % len(known)]) -> list[str]:
            bundle = copy_of(good.bundle, folder)
            path = bundle / "module.ir"
            before = path.read_text()
            path.write_bytes(alter(before))
            assert path.read_text(errors="replace") != before
            seal(bundle)
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

        def make(
            folder: Path, good: Good, file: str = file, content: bytes = content, command: str = command
        ) -> list[str]:
            bundle = copy_of(good.bundle, folder)
            (bundle / file).write_bytes(content)
            seal(bundle)
            (folder / "metrics.jsonl").write_text('{"step": 0, "step_s": 0.1}\n' * 9)
            if command == "onnx":
                return ["export", str(bundle), "--onnx", str(folder / "out.onnx")]
            return _READERS[command](bundle, folder, good)

        yield Case(f"forged-{name}", make)
