"""The errors that a user can meet, each with an exit code of the command line.

An error says *where* it happened, *what* was found (and what was expected), and, when there is one, a *hint* on what to
do next. Bugs of Penstock raise AssertionError and are not part of this hierarchy.

Quoted text comes from files and the command line, and may hold control characters of a terminal: `str` escapes them.
Ends of lines in `what` and `hint` stay, and further lines are indented, so that no quoted text looks like a line of the
program. Lines of any length, and lists of any, are cut.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from .words import shortened, visible, visible_lines

# The disk is at fault, or its quota: no other option or path of the user's is asked for.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class PenstockError(Exception):
    """Base of all errors that are meant for a user's eyes."""

    exit_code = 1
    # The rank that is the cause, if it is known.
    rank: int | None = None

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        what, hint = shortened(visible_lines(self.what)), shortened(visible_lines(self.hint))
        text = f"{shortened(visible(self.where))}: {what}" if self.where else what
        return f"{text}\n  hint: {hint}" if self.hint else text


class UsageError(PenstockError):
    """The error of options or files that make no sense, alone or together."""

    exit_code = 2


class ParseError(UsageError):
    """IR text that does not follow the grammar; `where` is file:line."""


class UnsupportedModel(PenstockError):
    """A model that is valid but needs something Penstock does not have; lists everything at once."""

    exit_code = 3


class DoesNotFit(PenstockError):
    """The error that no plan meets the limits of memory or devices.

    `excess` says, for stages that do not fit, how many times the memory of their device they need, where that is known.
    `needs` are the bytes that devices would have to have, by their names, where that is known.
    """

    exit_code = 4

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        excess: Mapping[int, float] | None = None,
        needs: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.excess, self.needs = excess or {}, needs or {}


class VerifyError(PenstockError):
    """A module, bundle or result that breaks an invariant."""

    exit_code = 5


class PeerLost(PenstockError):
    """The error that a rank died, hung or closed its connection."""

    exit_code = 6


class QueueFull(PenstockError):
    """The error that requests come faster than they are answered."""

    exit_code = 6
