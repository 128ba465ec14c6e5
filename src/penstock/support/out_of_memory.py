"""The recognition of errors that mean the system had no more memory.

Python, torch, the C++ runtime of TVM, protobuf, the loader of libraries and the starter of threads report it in
different ways. Their errors may be wrapped in others.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

_SAID = (
    "can't allocate memory",
    "bad_alloc",
    "out of memory",
    "annot allocate memory",  # of the system, and of the loader of libraries
    "can't start new thread",
    "failed to map segment",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, means that there was no more memory."""
    return any(_says_so(cause) for cause in _behind(error))


def ended_out_of_memory(output: str) -> bool:
    """Return whether the last line that a process wrote before it ended means that there was no more memory.

    It is the last line of a traceback, or C++'s report of an uncaught exception. Lines that Python adds as it ends do
    not count: where its threads were, and in development mode what was left open.
    """
    lines = output.partition("Fatal Python error: ")[0].splitlines()
    # After a warning there may be its line of source.
    warned = [number for number, line in enumerate(lines) if "ResourceWarning: " in line]
    added = {
        *warned,
        *(number + 1 for number in warned if number + 1 < len(lines) and lines[number + 1].startswith("  ")),
    }
    last = next((line for number, line in reversed([*enumerate(lines)]) if line.strip() and number not in added), "")
    return last.partition(":")[0].endswith(MemoryError.__name__) or any(words in last for words in _SAID)


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if isinstance(error, RuntimeError | OSError | ImportError):
        return any(words in str(error) for words in _SAID)
    # Extension modules forget to say why an allocation failed.
    if isinstance(error, SystemError):
        return str(error).endswith("error return without exception set")
    # protobuf's DecodeError, which is an Exception and no more.
    return str(error).endswith("Arena alloc failed")


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
