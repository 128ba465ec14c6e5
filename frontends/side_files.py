"""Files beside the weights of a model: settings as JSON, and the files of a tokenizer, which travel with a bundle.

Every file is a plain file inside the model's folder: links out of it and names that lead out of it are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.support.errors import UsageError

CONFIG, GENERATION = "config.json", "generation_config.json"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_LARGEST_SETTINGS = 1 << 26


def texts_beside(root: Path) -> dict[str, bytes]:
    """Read those files of a folder that travel with a bundle."""
    return {name: data for name in TEXT_FILES if (data := _read(root, name)) is not None}


def read_settings(root: Path, name: str) -> dict[str, Any] | None:
    """Read a file of settings. None where there is none."""
    data = _read(root, name)
    if data is None:
        return None
    try:
        settings = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not readable as JSON: {error}", where=str(root / name)) from error
    if not isinstance(settings, dict):
        raise UsageError("expected an object", where=str(root / name))
    return settings


def _read(root: Path, name: str) -> bytes | None:
    path = plain_file(root, name)
    if path is None:
        return None
    if path.stat().st_size > _LARGEST_SETTINGS:
        raise UsageError(f"has {path.stat().st_size} bytes, more than {_LARGEST_SETTINGS}", where=str(path))
    return path.read_bytes()


def plain_file(root: Path, name: str) -> Path | None:
    """Return the path of a file of the folder, None where it is missing. Refuse what leads out of the folder."""
    if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise UsageError(f"the file name {name!r} leads out of the folder", where=str(root))
    path = root / name
    if path.is_symlink() and path.resolve().parent != root.resolve():
        raise UsageError(
            f"{name} is a link out of the folder", where=str(root), hint="copy the folder with its files: cp -rL"
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{name} is no plain file", where=str(root))
    return path if path.exists() else None
