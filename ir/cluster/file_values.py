"""The keys of the tables of a cluster file, and the values that each may have.

In: a table of a file, and the keys that it may have. Out: plain values, and a problem for each key or value that is
wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .quantities import check_range, parse_quantity

_NAME = re.compile(r"[\w./:\-]+")
_PATH = re.compile(r"[\w./:\-+@=,~]*")
# Numbers as CUDA counts the devices that a process sees, and UUIDs, which may be cut short.
_GPU = re.compile(r"[0-9]{1,3}|(GPU|MIG)-[0-9a-zA-Z/-]+")
# The type of each key: a word, a whole number, a share, or a quantity. Types that end in ? allow zero.
DEVICE = {
    "name": "name",
    "kind": "word",
    "host": "name",
    "target": "name",
    "arch": "name",
    "threads": "count",
    "memory": "bytes",
    "spaces": "table",
    "flops": "operations per second",
    "bandwidth": "bytes per second",
    "cache": "bytes?",
    "cache_bandwidth": "bytes per second?",
    "overhead": "seconds?",
    "call_overhead": "seconds?",
    "message_overhead": "seconds?",
    "socket_bandwidth": "bytes per second",
    "shared_overhead": "seconds?",
    "copy_bandwidth": "bytes per second",
    "efficiency": "table",
    "gpu": "gpu",
    "source": "word",
    "quota": "share",
    "quota_period": "seconds?",
}
LINK = {"a": "name", "b": "name", "bandwidth": "bytes per second", "latency": "seconds?", "nic": "name?"}
CLASS = {"bandwidth": "bytes per second", "latency": "seconds?"}
SPACE = {
    "name": "word",
    "host": "name?",
    "kind": "word",
    "bytes": "bytes?",
    "path": "path?",
    "bandwidth": "bytes per second?",
    "latency": "seconds?",
}
WAY = {
    "device": "name",
    "space": "name",
    "bandwidth": "bytes per second",
    "latency": "seconds?",
    "nic": "name?",
}
HOST = {
    "name": "name",
    "address": "name?",
    "interface": "name?",
    "nic_bandwidth": "bytes per second?",
    "nic_latency": "seconds?",
    "device": "table",
}


class ValueReader:
    """A reader of values, which collects every problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def need_name(self, where: str, values: Mapping[str, Any]) -> None:
        if "name" not in values:
            self.problems.append(f"{where}: needs a name without blanks")

    def take(self, where: str, table: Mapping[str, object], spec: Mapping[str, str]) -> dict[str, Any]:
        """Return the valid keys of a table as plain values, and report problems with the other keys."""
        values: dict[str, Any] = {}
        for key, content in table.items():
            if key not in spec:
                self.problems.append(f"{where}: unknown key {key!r}, expected one of {', '.join(spec)}")
                continue
            checked = self.value(where, key, content, spec[key])
            if checked is not None:
                values[key] = checked
        return values

    def value(self, where: str, key: str, content: object, kind: str) -> Any:
        """Return a value in the type that it must have. Report a problem and return None if it has another."""
        plain = kind.rstrip("?")
        if plain == "path":
            if isinstance(content, str) and _PATH.fullmatch(content):
                return content
            self.problems.append(f"{where}: {key} must be the path of a folder without blanks, got {content!r}")
        elif plain in ("name", "word"):
            if isinstance(content, str) and (_NAME.fullmatch(content) or (content == "" and kind.endswith("?"))):
                return content
            self.problems.append(
                f"{where}: {key} must be a name without blanks, of letters, digits and . / : - _, got {content!r}"
            )
        elif plain == "gpu":
            if type(content) in (int, str) and _GPU.fullmatch(str(content)):
                return str(content)
            self.problems.append(f"{where}: gpu must be a number from 0 on or a UUID, GPU-..., got {content!r}")
        elif plain == "table":
            if isinstance(content, dict):
                return content
            self.problems.append(f"{where}: {key} must be a table, got {content!r}")
        else:
            try:
                if plain != "count":
                    return parse_quantity(content, kind)
                if type(content) is not int or content <= 0:
                    raise ValueError(f"must be positive, a whole number, got {content!r}")
                check_range(content, content, plain)
            except ValueError as error:
                self.problems.append(f"{where}: {key} {error}")
            else:
                return content
        return None
