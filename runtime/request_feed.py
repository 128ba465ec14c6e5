"""Microbatches of requests as a worker gets them: Piece messages in order, then End. Each may be run as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ir.errors import VerifyError
from .control import Arrays, End, Message, Piece
from .status import Status

# (message, its arrays); None when nothing is there and the caller did not want to wait
Receive = Callable[[bool], tuple[Message, Arrays] | None]


class RequestFeed:
    """A Feed that counts microbatches; `first` is the first of them."""

    def __init__(self, first: int, receive: Receive, status: Status) -> None:
        self._receive, self._status = receive, status
        self._pieces: dict[int, Arrays] = {}
        self._next, self._ended = first, False

    def exists(self, mb: int) -> bool | None:
        while mb >= self._next and not self._ended:
            message = self._receive(False)
            if message is None:
                return None
            self._take(*message)
        return mb < self._next

    def wait(self, mb: int) -> None:
        # Requests may be a long time coming: nobody should take the last action for one that hangs.
        self._status.show("waiting for requests")
        while mb >= self._next and not self._ended:
            message = self._receive(True)
            assert message is not None
            self._take(*message)

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        return self._pieces[mb][name]

    def finish(self, mb: int) -> None:
        self._pieces.pop(mb, None)

    def _take(self, message: Message, arrays: Arrays) -> None:
        match message:
            case Piece(mb) if mb == self._next:
                if arrays:  # none for a microbatch that another rank of the stage runs
                    self._pieces[mb] = arrays
                self._next += 1
            case End():
                self._ended = True
            case _:
                raise VerifyError(f"command {type(message).__name__} is out of place among requests")
