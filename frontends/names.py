"""Names of a source model as names of the IR.

In: every tensor name of its graph. Out: one IR name for each, the same string wherever the text form of the IR can print it. A
character outside `[A-Za-z0-9_./:-]` becomes `_`; where two names would meet, the changed one gets `.1`, `.2`, ... Names that need no
change are never changed, whatever the others are called, so the mapping is injective, and `changed` turns it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.ir.graph import Namer

_OTHER = re.compile(r"[^A-Za-z0-9_./:-]")


def legal(name: str) -> str:
    """The name with every character that the text form cannot print replaced; not unique by itself."""
    return _OTHER.sub("_", name) or "_"


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
        """A fresh name that is also the source's name for something: for tensors that the source does not
        name itself, or names more than once."""
        name = self.fresh(base)
        self._table[name] = name
        return name

    def changed(self, used: Iterable[str]) -> dict[str, str]:
        """IR name -> the source's name for those of `used` (IR names) that differ."""
        used = set(used)
        return {ours: theirs for theirs, ours in self._table.items() if ours != theirs and ours in used}
