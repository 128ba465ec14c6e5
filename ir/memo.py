"""A cache of results, kept with the object they were computed from, which does not change: a graph, a module.

A result is kept under a key that is declared once, beside the function that computes it:

    _BLOCKS = Derived[list[int]](__name__, "blocks")

The type of the key is that of the result. The key holds the name of its file, so no two files share one by accident.
Results are pickled with their object, under the names of their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Derived(Generic[Result]):
    """The key of a result of a type."""

    __slots__ = ("name",)

    def __init__(self, file: str, name: str) -> None:
        self.name = f"{file}.{name}"


class Memo:
    """Results that were derived from one object, each computed once."""

    __slots__ = ("_results",)

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}

    def get(self, key: Derived[Result]) -> Result | None:
        """Return the result under a key; None where there is none yet."""
        return self._results.get(key.name)

    def put(self, key: Derived[Result], result: Result) -> None:
        self._results[key.name] = result

    def once(self, key: Derived[Result], find: Callable[[], Result]) -> Result:
        """Return the result under a key, computed by `find` where there is none yet."""
        if key.name not in self._results:
            self._results[key.name] = find()
        result: Result = self._results[key.name]
        return result
