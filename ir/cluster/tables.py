"""Tables of a file in TOML or YAML, as plain data.

In: a path, whose name says which. Out: what stands there. A key that stands twice is an error in both.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from penstock.support.errors import UsageError


def read_tables(path: str | os.PathLike[str]) -> object:
    """Return the content of a file; a UsageError where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _load_yaml(text) if is_yaml(path) else tomllib.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # also long numbers
        raise UsageError(f"cannot read the cluster: {error}", where=str(path)) from error


def is_yaml(path: str | os.PathLike[str]) -> bool:
    """Return whether a cluster file is YAML, by its name."""
    return str(path).endswith((".yaml", ".yml"))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML reader that refuses a key that stands twice, as TOML does; YAML itself would keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def _load_yaml(text: str) -> object:
    # _Loader makes plain data only, as SafeLoader does.
    return yaml.load(text, _Loader)
