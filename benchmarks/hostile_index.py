"""Indexes of checkpoints that no run wrote: damaged ones, and ones whose hash is right and whose contents are not."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX, INDEX_HASH = "index.json", "index.sha256"


def _nested(index: dict[str, Any], chance: random.Random) -> bytes:
    return b"[" * 100_000


def _noise(index: dict[str, Any], chance: random.Random) -> bytes:
    return chance.randbytes(chance.randrange(5000))


def _cut(index: dict[str, Any], chance: random.Random) -> bytes:
    text = json.dumps(index).encode()
    return text[: chance.randrange(len(text))]


def _changed(name: str, values: list[Any]) -> Callable[[dict[str, Any], random.Random], bytes]:
    def change(index: dict[str, Any], chance: random.Random) -> bytes:
        return json.dumps(index | {name: chance.choice(values)}).encode()

    return change


def _outside(index: dict[str, Any], chance: random.Random) -> bytes:
    files = dict(index["files"])
    name = chance.choice(sorted(files))
    files[chance.choice(("../../etc/passwd", "/etc/passwd", "a/../../b", "\0", "n" * 10_000))] = files.pop(name)
    return json.dumps(index | {"files": files}).encode()


def _lost(index: dict[str, Any], chance: random.Random) -> bytes:
    files = dict(index["files"])
    files["rank9.safetensors"] = files[chance.choice(sorted(files))]
    return json.dumps(index | {"files": files}).encode()


def _size(index: dict[str, Any], chance: random.Random) -> bytes:
    files = json.loads(json.dumps(index["files"]))
    files[chance.choice(sorted(files))]["size"] = chance.choice((0, -1, 2**63, "1", None))
    return json.dumps(index | {"files": files}).encode()


# Each is written with the hash that belongs to it, so that its contents are looked at.
WAYS: dict[str, Callable[[dict[str, Any], random.Random], bytes]] = {
    "nested": _nested,
    "noise": _noise,
    "cut": _cut,
    "outside": _outside,
    "lost": _lost,
    "size": _size,
    "format": _changed("format", [0, 99, -1, "2", None, [], 1e300]),
    "step": _changed("step", [-1, 2**63, 1e300, "1", None, {}]),
    "files": _changed("files", [None, [], "x", {"a": 1}]),
    "microbatches": _changed("microbatches", [0, -4, "4", None]),
}


def spoil_index(checkpoint: Path, chance: random.Random) -> str:
    """Write another index into a checkpoint; return what was done to it."""
    way = chance.choice(sorted(WAYS))
    text = WAYS[way](json.loads((checkpoint / INDEX).read_text()), chance)
    (checkpoint / INDEX).write_bytes(text)
    if chance.random() < 0.75:
        (checkpoint / INDEX_HASH).write_text(f"{hashlib.sha256(text).hexdigest()}  {INDEX}\n")
        return way
    return f"{way}, another hash"
