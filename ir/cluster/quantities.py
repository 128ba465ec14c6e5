"""Numbers with units, as cluster files have them, and the ranges of plausible ones.

In: a value of a file, and its type: bytes, seconds, a rate, a share. A type that ends in ? allows zero. Out: the
number, or a ValueError that says what is wrong with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import fields
from fractions import Fraction

# The simulator shares every one of them out.
MOST_THREADS = 65536
_QUANTITY = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*)")
# Exact, so that "5 us" is the number 5e-6.
_SCALE = (
    {"": Fraction(1)}
    | {s: Fraction(10) ** (3 * i) for i, s in enumerate("kmgtp", 1)}
    | {f"{s}i": Fraction(2) ** (10 * i) for i, s in enumerate("kmgt", 1)}
)
_UNITS = {
    "bytes": {f"{scale}b": factor for scale, factor in _SCALE.items()},
    "bytes per second": {
        f"{scale}{unit}": f / n for scale, f in _SCALE.items() for unit, n in (("b/s", 1), ("bit/s", 8))
    },
    "seconds": {
        "s": Fraction(1),
        "ms": Fraction("1e-3"),
        "us": Fraction("1e-6"),
        "µs": Fraction("1e-6"),
        "ns": Fraction("1e-9"),
    },
    "operations per second": {f"{scale}{unit}": f for scale, f in _SCALE.items() for unit in ("flop/s", "flops")},
}
# The range of plausible values. Values outside of it are slips, or would overflow sums of times. Zero has a rule of its
# own.
_RANGES = {
    "bytes": (1, 2**60),
    "bytes per second": (1.0, 1e24),
    "operations per second": (1.0, 1e24),
    "seconds": (0.0, 1e6),
    "share": (1e-6, 1e6),
    "count": (1, MOST_THREADS),
}
_EXAMPLES = {"bytes": "8 GiB", "bytes per second": "2 GB/s", "seconds": "50 us", "operations per second": "50 GFLOP/s"}


def parse_quantity(value: object, kind: str) -> float | int:
    """Return a number of a type, without its unit; bytes are whole."""
    plain = kind.rstrip("?")
    units = _UNITS.get(plain, {})
    number: float | int | None = None
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif match is not None:
        unit = match[2].strip().lower()
        if unit == "" or unit in units:
            try:
                number = float(Fraction(match[1]) * units.get(unit, 1))
            except OverflowError:
                number = math.inf
    if number is None:
        like = f"a number of {plain}" + (f" or with a unit, like {_EXAMPLES[plain]!r}" if units else "")
        per_second = match is not None and f"{match[2].strip().lower()}/s" in units
        meant = f", did you mean '{value}/s'?" if per_second else ""
        raise ValueError(f"must be {like if units else 'a number'}, got {value!r}{meant}")
    if not (number >= 0 if kind.endswith("?") else number > 0) or math.isinf(number):
        raise ValueError(f"must be positive{' or 0' if kind.endswith('?') else ''} and finite, got {value!r}")
    if number and not (plain == "bytes" and number < 1):
        check_range(value, number, plain)
    if plain == "bytes":
        if int(number) == 0 and not kind.endswith("?"):
            raise ValueError(f"must be a byte or more, got {value!r}")
        return int(number)
    return float(number)


def check_range(value: object, number: float, kind: str) -> None:
    """Raise a ValueError for a number that is not plausible."""
    least, most = _RANGES[kind]
    if not least <= number <= most:
        shown = repr(value) if len(repr(value)) <= 40 else f"{number:.3g}"
        raise ValueError(f"must be from {least:g} to {most:g}, got {shown}")


def refuse_unknown(given: Iterable[str], kind: type) -> None:
    """Raise a ValueError for a key that a dataclass has no field for."""
    known = [f.name for f in fields(kind)]
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {key!r}, expected one of {', '.join(known)}")
