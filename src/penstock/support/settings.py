"""Settings of a verb as a frozen dataclass: name, default, check and help of each stand in its field, and nowhere else.

    @dataclass(frozen=True)
    class Options:
        steps: int = setting(10, "optimiser steps (default: 10)", check=POSITIVE, shown="N")

Flags of the command line, defaults of Python arguments and keys of files are read from the fields. Two verbs that share
a setting share its field: `shared(Options, "steps")`, with another default where they differ in that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

_KEY = "setting"


class Check(NamedTuple):
    """A rule for values: `read` makes one of text, with ValueError for anything but what is `expected`."""

    expected: str
    read: Callable[[str], Any]


def _whole(low: int, end: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `low` to below `end`. It takes decimal digits alone; `int` takes signs,
    blanks and underscores, too."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not low <= int(text) < end:
            raise ValueError(text)
        return int(text)

    return read


POSITIVE = Check("a whole number from 1 on", _whole(1, 2**31))
# Zero is a number, too. Values that are no numbers get the same message.
WHOLE = Check(POSITIVE.expected, lambda text: 0 if text == "0" else POSITIVE.read(text))
LEVEL = Check("a level from 0 to 3", _whole(0, 4))
SEED = Check(f"a whole number from 0 to {2**63 - 1}", _whole(0, 2**63))


@dataclass(frozen=True)
class Description:
    """A setting beside its name and default: `help`, the words to choose from, the check of its values or what reads
    them, and the placeholder `shown` for a value. `words` are what flags call values that are no text. `flags` are its
    spellings as a flag where these are not its name; `many` says that it may be given several times. `problems` lists
    what is wrong with a value that is not None, and `needs` names the setting without which this one says nothing. A
    `rare` one stands in `--help-all` alone."""

    help: str
    choices: tuple[str, ...] = ()
    check: Check | None = None
    shown: str | None = None
    read: Callable[[str], object] | None = None
    words: Mapping[str, object] | None = None
    flags: tuple[str, ...] = ()
    many: bool = False
    problems: Callable[[Any], list[str]] | None = None
    needs: str = ""
    rare: bool = False


def setting(default: Any, help: str = "", **about: Any) -> Any:
    """Return the field of a setting. `about` are fields of `Description`."""
    return field(default=default, metadata={_KEY: Description(help, **about)})


def required(help: str = "", **about: Any) -> Any:
    """Return the field of a setting without a default."""
    return field(metadata={_KEY: Description(help, **about)})


def shared(kind: type, name: str, default: Any = MISSING) -> Any:
    """Return the field of a setting that another verb has as well, perhaps with another default."""
    original = next(row for row in fields(kind) if row.name == name)
    return field(default=original.default if default is MISSING else default, metadata=original.metadata)


def settings_of(kind: type) -> dict[str, Description]:
    """Return the settings of a verb by name. Fields that no user sets are left out."""
    return {row.name: row.metadata[_KEY] for row in fields(kind) if _KEY in row.metadata}


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the defaults of a verb's settings. Required settings are left out."""
    return {row.name: row.default for row in fields(kind) if _KEY in row.metadata and row.default is not MISSING}


def flags_of(name: str, setting: Description) -> tuple[str, ...]:
    """Return the spellings of a setting on the command line."""
    return setting.flags or (f"--{name.replace('_', '-')}",)


def problems_of(options: Any) -> list[str]:
    """List the problems of the values, each seen by itself and with the one it needs, in the order of the fields."""
    problems: list[str] = []
    described = settings_of(type(options))
    defaults = defaults_of(type(options))
    for name, about in described.items():
        value = getattr(options, name)
        if about.needs and value != defaults[name] and getattr(options, about.needs) is None:
            needed = described[about.needs]
            problems.append(f"{flags_of(name, about)[0]} needs {flags_of(about.needs, needed)[0]} {needed.shown}")
        if about.choices and value != defaults.get(name) and value not in about.choices:
            problems.append(f"{flags_of(name, about)[0]} is one of {', '.join(about.choices)}, not {value!r}")
        if about.problems is not None and value is not None:
            problems += about.problems(value)
    return problems


def given(options: Any) -> list[str]:
    """Return the flags of the settings that are not at their defaults."""

    def plain(value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    defaults = defaults_of(type(options))
    return [
        flags_of(name, about)[0]
        for name, about in settings_of(type(options)).items()
        if name not in defaults or plain(getattr(options, name)) != defaults[name]
    ]
