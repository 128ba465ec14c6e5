"""Names of a source model as names of the IR.

In: every tensor name of its graph. Out: one IR name for each, the same string wherever the text form of the IR can
print it. A character outside `[A-Za-z0-9_./:-]` becomes `_`. If the result is in use already, it gets `.1`, `.2`, ... A
name that needs no change is never changed, so the mapping is injective, and `changed` inverts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.ir.graph import Namer
from penstock.support.errors import UsageError

_OTHER = re.compile(r"[^A-Za-z0-9_./:-]")


def legal(name: str) -> str:
    """Replace every character that the text form cannot print. The result need not be unique."""
    return _OTHER.sub("_", name) or "_"


def pattern_of(text: str | None, flag: str, where: str) -> re.Pattern[str] | None:
    """Compile the pattern of names that the user has set by `flag`, if any."""
    try:
        return re.compile(text) if text else None
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{flag} {text!r} is not a regular expression: {error}", where=where) from error


class Names:
    """IR names of the source's tensors, and fresh names for the values in between."""

    def __init__(self, names: Iterable[str]) -> None:
        names = [n for n in dict.fromkeys(names) if n]
        kept = [n for n in names if legal(n) == n]
        self._namer = Namer(kept)
        self._table = {n: n for n in kept}
        for name in names:
            if name not in self._table:
                self._table[name] = self._namer.fresh(legal(name))

    def __getitem__(self, name: str) -> str:
        return self._table[name]

    def fresh(self, base: str) -> str:
        return self._namer.fresh(legal(base))

    def new(self, base: str) -> str:
        """Reserve a fresh name that is also the source's name.

        It is for tensors that the source does not name, or names more than once.
        """
        name = self.fresh(base)
        self._table[name] = name
        return name

    def changed(self, used: Iterable[str]) -> dict[str, str]:
        """Map those of the IR names `used` that differ from the source's to the source's names."""
        used = set(used)
        return {ours: theirs for theirs, ours in self._table.items() if ours != theirs and ours in used}
