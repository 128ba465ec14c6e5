"""The message that a run ends with when a rank has failed or was lost.

In: what the ranks were doing. Out: sentences that name rank, host, stage, action and peer, and the last good step.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.ir.schedule import RECEIVES, Action
from penstock.runtime.checkpoint.finding import find_checkpoint
from penstock.runtime.checkpoint.format import LATEST
from penstock.runtime.messages.control import Failed
from penstock.runtime.messages.status import describe_line
from penstock.support import errors
from penstock.support.errors import PeerLost, PenstockError

from .logs import stages_in_words

# More ranks than these are not listed.
_MOST_LISTED = 16

_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PenstockError)
}


def place(rank: int, stages: Sequence[int], doing: str, host: str = "") -> str:
    """Name the place of an error: of the stages of a rank, that of the action which it was at."""
    on, acts = f"host {host}, " if host else "", ""
    with contextlib.suppress(ValueError):
        stages, acts = [Action.parse(doing).stage], "action "
    return f"rank {rank}, {on}{stages_in_words(stages)}, {acts}{doing or 'starting'}"


def named(rank: int, stages: Sequence[int], process: int, host: str) -> str:
    """Name a rank as the subject of a sentence."""
    return f"rank {rank} ({stages_in_words(stages)}, process {process} on {host})"


def ending(code: int) -> str:
    """Describe how a process ended, by its exit code as subprocess gives it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def others(doing: Mapping[int, str], besides: int | None = None) -> list[str]:
    """List what the other ranks were at."""
    listed = [f"rank {rank} was at {describe_line(text)}" for rank, text in doing.items() if rank != besides]
    return listed if len(listed) <= _MOST_LISTED else [*listed[:_MOST_LISTED], f"and {len(listed) - _MOST_LISTED} more"]


def reached(step: int | None, checkpoints: str | None) -> str:
    """Name the last good step, and the checkpoint to go on from."""
    words = "no step was finished" if step is None else f"last finished step {step}"
    newest = newest_checkpoint(checkpoints)
    return words + (f", newest checkpoint {newest}" if newest is not None else "")


def newest_checkpoint(directory: str | None) -> Path | None:
    """Return the newest checkpoint in a directory where there may be none."""
    if directory is None or not (Path(directory) / LATEST).is_file():
        return None
    with contextlib.suppress(PenstockError):
        return find_checkpoint(directory)
    return None


def waits_for(rank: int, doing: Mapping[int, str]) -> int:
    """Return the rank at the end of the chain of those that wait for a message of the next one. Where it is a circle,
    return one in it."""
    seen = {rank}
    while True:
        try:
            action = Action.parse(doing.get(rank, ""))
        except ValueError:
            return rank
        if action.kind not in RECEIVES or action.peer is None or action.peer in seen:
            return rank
        rank = action.peer
        seen.add(rank)


def error_of(failed: Failed, where: str, doing: Mapping[int, str], rank: int, note: str) -> PenstockError:
    """Return a rank's report as an error; `where` is the rank's place."""
    kind = _ERRORS.get(failed.error)
    if kind is None:
        return PenstockError(f"internal error:\n{failed.what}\n{note}", where=where, hint="please report this")
    if kind is PeerLost:
        cause = waits_for(rank, doing)
        chain = (
            [f"all wait for rank {cause}, which was at {describe_line(doing[cause])}"]
            if cause != rank and cause in doing
            else []
        )
        return PeerLost(
            "; ".join([failed.what, *chain, note, *others(doing, rank)]), where=failed.where or where, hint=failed.hint
        )
    what = failed.what if doing[rank] in ("starting", "joining", "loading") else f"{failed.what}; {note}"
    return kind(what, where=f"{where}: {failed.where}" if failed.where else where, hint=failed.hint)


def is_passing(error: PenstockError) -> bool:
    """Return whether another try may go well: a lost rank, or an exception of an unknown kind. An error of the inputs
    stays."""
    return isinstance(error, PeerLost) or type(error) is PenstockError
