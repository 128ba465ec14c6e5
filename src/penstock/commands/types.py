"""Numbers and lists on the command line, as argparse takes them.

In: text. Out: a value, or a message about what was expected.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.support.settings import POSITIVE, Check


def reader(check: Check) -> Callable[[str], Any]:
    """Read values of a setting."""

    def read(text: str) -> Any:
        try:
            return check.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {check.expected}, got {text!r}") from None

    return read


positive_number = reader(POSITIVE)


def device_list(text: str) -> int | str:
    """Read a number of devices, or a list of their kinds."""
    if "," in text or text == "cpu" or text.startswith("sm_"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected a number, or a list of `cpu` and CUDA architectures such as cpu,sm_90, got {text!r}"
        )
    number: int = positive_number(text)
    return number
