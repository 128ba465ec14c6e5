"""The names of inputs and outputs outside of a module: as in the model it came from, or as in the IR.

In: our names of the inputs (or outputs), and the source's for those that had to be spelled otherwise. Out: tables from
one to the other. The source's names go before ours where one string is both; a name that the source has twice among
them means none of them, and ours stand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.support.errors import UsageError


def shown(names: Iterable[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """Map the names of a module to distinct names outside."""
    table = {name: renamed.get(name, name) for name in names}
    times = Counter(table.values())
    table = {ours: theirs if times[theirs] == 1 else ours for ours, theirs in table.items()}
    return table if len(set(table.values())) == len(table) else {name: name for name in table}


def accepted(names: Iterable[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """Map every name that a caller may use to the module's name."""
    outside = shown(names, renamed)
    return {name: name for name in outside} | {theirs: ours for ours, theirs in outside.items()}


def in_words_of_source(text: str, renamed: Mapping[str, str]) -> str:
    """Return a text about a module in which names that the source spells otherwise are its own.

    A name without its mark, `%` or `@`, counts only where it cannot be a word.
    """
    others = {ours: theirs for ours, theirs in renamed.items() if ours != theirs}
    if not others:
        return text
    names = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))

    def replaced(match: re.Match[str]) -> str:
        mark, ours = match.groups()
        return match[0] if not mark and ours.isalpha() else repr(others[ours])

    return re.sub(rf"(?<![\w./:%@-])([%@]?)({names})(?![\w./:-])", replaced, text)


def by_our_names(
    given: Mapping[str, Any], names: Iterable[str], renamed: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Return what a caller gives, by our names; names that mean nothing stay, and the caller says what is wrong."""
    if not isinstance(given, Mapping):
        raise UsageError(f"expected a dict of arrays by the names of inputs, got {type(given).__name__}", where=where)
    table = accepted(names, renamed)
    arrays: dict[str, Any] = {}
    for name, value in given.items():
        ours = table.get(name, str(name))
        if ours in arrays:
            raise UsageError(f"input {ours} is given twice, as {name} and by its other name", where=where)
        arrays[ours] = value
    return arrays
