"""The restart of a group's run by its launcher.

In: options, the environment. Out: where to begin, and where to end.

As long as a run with `--checkpoint DIR` is not finished, rank 0 keeps DIR/unfinished.json. It holds the name of the
run, where it began, and how many steps it was asked for. It also holds the checkpoints that the run began to write,
with what stood in their places before. A start with the name of that run goes on from the newest of these that is there
and whole. So does one of which the launcher says that it is not the first. A checkpoint comes to its place in one
rename, so one that was being written when the run ended is not there. Runs are named by PENSTOCK_RUN_ID, --rdzv-id of
torchrun, or the job of Slurm.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.runtime.checkpoint.finding import Chosen, choose, damage_of, decide_together
from penstock.runtime.checkpoint.format import step_name
from penstock.support.errors import PenstockError, VerifyError

from .options import RunOptions

if TYPE_CHECKING:
    from penstock.runtime.group.group import RankGroup

FILE = "unfinished.json"
# The number of damaged checkpoints after which a run begins anew.
MOST_SAVES = 8
# Environment variables with the number of earlier starts by the launcher's count.
_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class BegunSave(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A checkpoint that was begun: its name in the directory, and the identity of what stood there before."""

    name: str
    before: int | None = None


class UnfinishedRun(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A run under way. `saves` are its newest checkpoints, oldest first; `resume` what it began from, if not from
    nothing."""

    run: str
    first: int
    steps: int
    resume: str | None = None
    saves: tuple[BegunSave, ...] = ()


class Beginning(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The message of rank 0 to the other ranks. It has the checkpoint to load, and the step that the run ends before.
    It says whether it is a start after a failure, and what users should hear of the choice."""

    resume: str | None
    end: int | None
    again: bool
    words: list[str]

    @property
    def chosen(self) -> Chosen | None:
        return None if self.resume is None else Chosen(Path(self.resume), self.words)


def identity(place: Path) -> int | None:
    """Return the number of the directory that stands at a place."""
    try:
        return place.stat().st_ino
    except FileNotFoundError:
        return None


def finished_saves(saves: Iterable[tuple[Path, int | None]]) -> list[Path]:
    """Return the checkpoints that came to their places, newest first. `saves` are places with the identity of what
    stood there before."""
    return [place for place, before in reversed(list(saves)) if identity(place) not in (None, before)]


def begin_together(group: RankGroup, options: RunOptions) -> Beginning:
    """Find where the run begins: rank 0 alone looks, since a directory may change between two looks."""
    return decide_together(group, "beginning", lambda: _beginning(options), Beginning)


def _beginning(options: RunOptions) -> Beginning:
    unfinished = find_unfinished(options)
    if unfinished is None:
        chosen = None if options.resume is None else choose(options.resume)
        return (
            Beginning(None, None, False, [])
            if chosen is None
            else Beginning(str(chosen.place), None, False, chosen.words)
        )
    assert options.checkpoint is not None
    words: list[str] = []
    for place in finished_saves((Path(options.checkpoint) / save.name, save.before) for save in unfinished.saves):
        problems = damage_of(place)
        if not problems:
            return Beginning(str(place), unfinished.first + unfinished.steps, True, words)
        words.append(f"checkpoint {place.name} is damaged ({problems[0]}), and passed over")
    return Beginning(unfinished.resume, unfinished.first + unfinished.steps, True, words)


def run_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the id that the launcher gave this run, the same after a restart; empty where it has none."""
    names = [
        environment.get("PENSTOCK_RUN_ID", ""),
        environment.get("TORCHELASTIC_RUN_ID", ""),
        environment.get("SLURM_JOB_ID", ""),
    ]
    return next((name for name in names if name not in ("", "none")), "")


def find_unfinished(options: RunOptions, environment: Mapping[str, str] = os.environ) -> UnfinishedRun | None:
    """Return the record of this run, if it was started before and did not finish."""
    if options.checkpoint is None:
        return None
    path = Path(options.checkpoint) / FILE
    try:
        record = msgspec.json.decode(path.read_bytes(), type=UnfinishedRun)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise VerifyError(f"cannot be read: {error}", where=str(path), hint="remove it to begin anew") from error
    name = run_name(environment)
    counted = any(environment.get(count, "0") not in ("", "0") for count in _COUNTS)
    return record if (name and name == record.run) or (counted and record.run == name) else None


def begin(options: RunOptions, first: int) -> UnfinishedRun:
    """Record that a run has started or restarted."""
    record = find_unfinished(options) or UnfinishedRun(run_name(), first, options.steps, options.resume)
    write(options, record)
    return record


def note_save(options: RunOptions, record: UnfinishedRun, step: int) -> UnfinishedRun:
    """Record that a checkpoint is about to be begun."""
    assert options.checkpoint is not None
    save = BegunSave(step_name(step), identity(Path(options.checkpoint) / step_name(step)))
    earlier = [other for other in record.saves if other.name != save.name][1 - MOST_SAVES :]
    record = msgspec.structs.replace(record, saves=(*earlier, save))
    write(options, record)
    return record


def write(options: RunOptions, record: UnfinishedRun) -> None:
    """Replace the record; without a directory for checkpoints there is none."""
    if options.checkpoint is None:
        return
    path = Path(options.checkpoint) / FILE
    fresh = path.with_name(f".{FILE}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise PenstockError(f"cannot be written: {error}", where=str(path)) from error


def finish(options: RunOptions) -> None:
    """Record that the run is complete: its next start is a new one."""
    if options.checkpoint is not None:
        (Path(options.checkpoint) / FILE).unlink(missing_ok=True)
