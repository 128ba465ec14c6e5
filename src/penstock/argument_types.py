"""Numbers and lists on the command line, as argparse takes them: text in, a value out, or what was expected."""

from __future__ import annotations

import argparse


def positive_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def whole_number(text: str) -> int:
    return 0 if text == "0" else positive_number(text)


def seed_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**63 - 1}, got {text!r}")
    return int(text)


def device_list(text: str) -> int | str:
    if "," in text or text == "cpu" or text.startswith("sm_"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected a number, or a list of `cpu` and CUDA architectures such as cpu,sm_90, got {text!r}"
        )
    return positive_number(text)
