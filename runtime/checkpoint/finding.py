"""The choice of a checkpoint: which one a path means, and whether it is whole.

`latest` names the newest one. A damaged one is passed over for the newest whole one before it, and users hear of it.
One that is named by its own path is never replaced by another. Checkpoints above `latest` are of a run that was left
behind, for its user went back and trained on. They are looked at only where there is no `latest`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.backends.bundle.format import file_problems
from penstock.support import errors
from penstock.support.errors import PeerLost, PenstockError, UsageError, VerifyError
from penstock.support.paths import read_plain
from penstock.support.words import itemised

from .format import INDEX, LATEST, is_saved, left_behind, read_index, saved_step, saved_steps
from .stored_tiles import conflicts

# Keepers and launchers look at checkpoints, too, and need no torch.
if TYPE_CHECKING:
    from penstock.runtime.group.group import RankGroup

Decision = TypeVar("Decision", bound=msgspec.Struct)

# Rank 0 reads all files to check them, which may take any time; a lost rank ends the run elsewhere first.
_CHECK_SECONDS = 3600.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from, which is whole, and the newer ones that were passed over for it."""

    place: Path
    words: list[str]


class _Failure(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The reason why rank 0 could not decide."""

    error: str
    what: str
    where: str
    hint: str


def damage_of(place: Path) -> list[str]:
    """List the problems of a checkpoint: every file is read. UsageError for one that this version cannot read."""
    try:
        index = read_index(place)
    except VerifyError as error:
        return [error.what]
    problems = [
        p for name, file in index.files.items() for p in file_problems(place / name, file.sha256, file.size, name)
    ]
    if problems:
        return problems
    try:
        return list(conflicts(place, index.files))
    except VerifyError as error:
        return [error.what]


def candidates(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory that a run may go on from, newest first."""
    places = saved_steps(directory)
    names = {place.name for place in places}
    # A save replaced it, but did not rename the new checkpoint to its name.
    places += [
        path for path, kind in left_behind(directory) if kind == "old" and path.name[1:].partition(".")[0] not in names
    ]
    places.sort(key=saved_step, reverse=True)
    name = latest_name(directory)
    return [p for p in places if not is_saved(name) or saved_step(p) <= saved_step(directory / name)]


def latest_name(directory: Path) -> str:
    """Return the name in the pointer to the newest checkpoint; empty when there is no pointer."""
    try:
        return read_plain(directory / LATEST, 1 << 10).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise VerifyError(f"cannot read {LATEST}: {error.strerror}", where=str(directory)) from error


def is_place(path: Path) -> bool:
    """Return whether a path is that of a checkpoint, rather than of a directory of them."""
    return (path / INDEX).exists() or (is_saved(path.name) and path.is_dir())


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a user's path means: a checkpoint itself, or the newest one of a directory of them.
    Nothing in it is checked."""
    root = directory_meant(path)
    if is_place(root):
        return root
    places = candidates(root)
    if not places and not (root / LATEST).is_file():
        raise _missing(path)
    name = latest_name(root)
    if not places or (name and not is_saved(name)):
        listed = ", ".join(sorted(p.name for p in places)) or "none"
        raise VerifyError(
            f"{LATEST} names {name!r}, which is not a checkpoint here", where=str(path), hint=f"there are {listed}"
        )
    return places[0]


def directory_meant(path: str | os.PathLike[str]) -> Path:
    """Return the directory that a user's path names: the pointer to the newest checkpoint stands for the directory that
    it is in."""
    root = Path(os.path.abspath(path))
    return root.parent if root.name == LATEST and not root.is_dir() else root


def _missing(path: str | os.PathLike[str]) -> UsageError:
    """Return the error for a path without a checkpoint, which says what to give instead."""
    root = Path(os.path.abspath(path))
    hint = "give a directory that --checkpoint wrote"
    if is_place(root.parent):
        return UsageError("is a part of a checkpoint", where=str(path), hint=f"give the whole of it, {root.parent}")
    if siblings := [place.name for place in candidates(root.parent)]:
        hint = (
            f"{root.parent} stands for its newest checkpoint; it has "
            f"{', '.join(siblings[:8])}{' and more' * (len(siblings) > 8)}"
        )
    if not root.exists():
        return UsageError("there is no checkpoint: nothing is there", where=str(path), hint=hint)
    return UsageError(f"there is no checkpoint: neither {INDEX} nor {LATEST} is there", where=str(path), hint=hint)


def choose(path: str | os.PathLike[str]) -> Chosen:
    """Choose the checkpoint to go on from, whole: the one that is named, else the newest one that is."""
    place = find_checkpoint(path)
    if place == Path(os.path.abspath(path)):
        if problems := damage_of(place):
            raise VerifyError(
                "the checkpoint is damaged:" + itemised(problems),
                where=str(path),
                hint="resume from an older checkpoint",
            )
        return Chosen(place, [])
    words: list[str] = []
    for candidate in candidates(place.parent):
        problems = damage_of(candidate)
        if not problems:
            warnings = [f"{text}; going on from {candidate.name}" for text in words]
            if is_saved(name := latest_name(place.parent)) and not (place.parent / name).exists():
                warnings.append(f"{LATEST} names {name}, which is not there; going on from {candidate.name}")
            return Chosen(candidate, warnings)
        words.append(f"checkpoint {candidate.name} is damaged ({problems[0]})")
    raise VerifyError("no checkpoint is whole:" + itemised(words), where=str(path))


def decide_together(group: RankGroup, what: str, decide: Callable[[], Decision], kind: type[Decision]) -> Decision:
    """Decide on rank 0, which may read whole checkpoints, and send the decision to the other ranks. So each file is
    checked once, and all ranks do the same."""
    if group.rank == 0:
        try:
            decision = decide()
        except PenstockError as error:
            failed = _Failure(type(error).__name__, error.what, error.where, error.hint)
            group.put(f"{what}/failed", msgspec.json.encode(failed))
            group.put(what, b"")
            raise
        group.put(what, msgspec.json.encode(decision))
        return decision
    started = time.monotonic()
    while not group.store.check([what]):
        if time.monotonic() - started > _CHECK_SECONDS:
            raise PeerLost(f"rank 0 did not decide on {what} within {_CHECK_SECONDS:g} s", where=f"rank {group.rank}")
        time.sleep(_LOOK_SECONDS)
    answer = group.get(what, f"what rank 0 decided on {what}")
    if not answer:
        failure = msgspec.json.decode(group.get(f"{what}/failed", f"why rank 0 has no {what}"), type=_Failure)
        raise getattr(errors, failure.error, PenstockError)(failure.what, where=failure.where, hint=failure.hint)
    return msgspec.json.decode(answer, type=kind)
