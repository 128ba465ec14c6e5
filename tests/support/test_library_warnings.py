"""Output for people: warnings of libraries are one line with a count, and nothing else is swallowed."""

from __future__ import annotations

import os
import warnings

import pytest

from penstock.support.terminal import onnxruntime_warnings_counted, python_warnings_counted, write_to_people

KERNEL = "Could not find a CPU kernel and hence can't constant fold Div node '/n'"
LOGGED = f"2026-01-02 03:04:05.678901234 [W:onnxruntime:, constant_folding.cc:268 ApplyImpl] {KERNEL}"


def test_warnings_of_a_logger_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with onnxruntime_warnings_counted():
        os.write(2, f"\x1b[0;93m{LOGGED}\x1b[m\n{LOGGED}\n".encode() * 6)
    assert capfd.readouterr().err == f"onnxruntime warned 12 times; first: {KERNEL}\n"
    with onnxruntime_warnings_counted():
        os.write(2, f"{LOGGED}\n".encode())
    assert capfd.readouterr().err == f"onnxruntime warned 1 time; first: {KERNEL}\n"


def test_other_lines_stay(capfd: pytest.CaptureFixture[str]) -> None:
    """Errors of the logger, words of others and half a line are written as they came; so is all where the work fails."""
    others = f"{LOGGED.replace('[W:', '[E:')}\nterminate called\nhalf a line"

    @onnxruntime_warnings_counted()
    def failing() -> None:
        os.write(2, f"{LOGGED}\n".encode())
        write_to_people(others)
        raise ValueError("not hidden")

    with pytest.raises(ValueError, match="not hidden"):
        failing()
    printed = capfd.readouterr().err
    assert printed.startswith(others)
    assert printed.endswith(f"onnxruntime warned 1 time; first: {KERNEL}\n")
    with onnxruntime_warnings_counted():
        pass
    os.write(2, b"after\n")  # control: the descriptor leads where it led
    assert capfd.readouterr().err == "after\n"


def test_warnings_of_python_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with python_warnings_counted():
            warnings.warn("an axis\nis old", stacklevel=1)
            warnings.warn("another", DeprecationWarning, stacklevel=1)
        assert capsys.readouterr().err == "Python warned 2 times; first: UserWarning: an axis is old\n"
        with pytest.warns(UserWarning, match="outside"):  # control: nothing is collected any more
            warnings.warn("outside", stacklevel=1)
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="as asked"), python_warnings_counted():
            warnings.warn("as asked", stacklevel=1)
