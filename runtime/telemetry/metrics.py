"""Metrics of a training run.

In: finished steps with the time at which they were finished. Out: one JSON object per step and line, and progress.

    {"step": 0, "loss": 4.1, "lr": 0.01, "samples": 16, "step_s": 0.02, "samples_per_s": 800.0, "grad_norm": null}

An evaluation (worker/evaluation.py) has a row of its own, behind that of the step it follows:

    {"step": 99, "eval_loss": 3.9, "eval_samples": 1000, "eval_s": 0.5}

The last row of a run with a trace says how much of the time of messages was hidden (overlap.py):

    {"step": 99, "messages": 800, "messages_s": 1.9, "waited_s": 0.1, "hidden": 0.9474}

Where ranks do collectives, a row has those of each kind and axes: their number, and of all ranks together the bytes,
the seconds under way and the seconds that were waited (collective_times.py):

    {"step": 99, "shift_tp": 400, "shift_tp_bytes": 51200, "shift_tp_s": 0.4, "shift_tp_exposed_s": 0.1}

Where ranks copy between memory spaces, a row has those of each direction, in the same way:

    {"step": 99, "copies_in": 200, "copies_in_bytes": 409600, "copies_in_s": 0.4, "copies_in_waited_s": 0.1}

Where ranks have GPUs, a row has the most memory of each such rank's GPU in use at the end of a batch, by all programs.
It also has what captured calls of a rank keep:

    {"step": 99, "rank1_gpu_bytes": 2147483648, "rank1_captured_bytes": 209715200}

`step_s` is the time since the step before (since the start of the run for the first one). `grad_norm`, that of the
whole gradient before it is clipped, is null where training does not ask for it (`clip`, `skip_nonfinite`, f16). An
update by one that is not finite was skipped. A number that is not finite is written as the string "nan" or "inf",
because JSON has no such numbers. The first such loss is warned of. A terminal gets one line that is written over,
anything else a plain line every few seconds and one at the end. The line has how busy each stage is (utilisation.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from penstock.ir.action_kinds import COPY_IN, COPY_OUT
from penstock.ir.schedule import Action
from penstock.runtime.messages.control import Evaluation, Step
from penstock.runtime.messages.ledger import CopyTimes
from penstock.support.errors import PenstockError, UsageError
from penstock.support.terminal import StatusLine
from penstock.support.words import shown_bytes

from .collective_times import CollectiveTotal, by_name
from .overlap import Overlap
from .sinks import Row, Sinks
from .utilisation import Utilisation

# Seconds between two forms of the progress line on a terminal.
_TERMINAL_EVERY = 0.1
_WAIT_WORTH_TELLING = 1.0
_HANDOVER_SECONDS, _LOOK_SECONDS = 5.0, 0.1


class Metrics:
    """The writer of metrics, line by line, which shows progress. `total` is the number of the last step plus one, `log`
    other places that get them (sinks.py)."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        samples: int,
        first: int,
        total: int,
        *,
        progress: bool = True,
        append: bool = False,
        log: Sequence[str] = (),
        busy: Utilisation | None = None,
    ) -> None:
        self._file: IO[str] | None = None
        self._path = path
        if path is not None:
            try:
                self._file = _open(Path(path), first if append else 0)
            except OSError as error:
                raise self._unwritable(error) from error
        self._samples, self._first, self._total = samples, first, total
        self._busy = busy
        self._line = StatusLine(not progress, _TERMINAL_EVERY)
        self._sinks = Sinks(log, self._line.interrupt)
        self._started = self._last = time.monotonic()
        # Eight bytes a step: a run may have millions of them.
        self.losses = array("d")
        self._warned = self._told_wait = False

    def start(self) -> None:
        """Begin the time of the run: loading is not part of the first step."""
        if self._busy is not None:
            self._busy.look()
        self._started = self._last = time.monotonic()

    def add(self, step: Step) -> None:
        seconds = max(step.at - self._last, 1e-9)
        self._last = max(step.at, self._last)
        self.losses.append(step.loss)
        row: Row = {
            "step": step.step,
            "loss": _number(step.loss),
            "lr": step.lr,
            "samples": self._samples,
            "step_s": round(seconds, 6),
            "samples_per_s": round(self._samples / seconds, 3),
            "grad_norm": _number(step.grad_norm),
        }
        self._write(row)
        if not math.isfinite(step.loss) and not self._warned:
            self._warned = True
            skipped = step.grad_norm is not None and not math.isfinite(step.grad_norm)
            self._line.interrupt(
                f"warning: the loss of step {step.step} is {step.loss}; "
                f"{'its update is skipped' if skipped else 'the run goes on'}"
            )
        self._show(step, last=step.step + 1 == self._total)

    def tell_wait(self, seconds: float) -> None:
        """Report once that training waited for a checkpoint because the one before was still being written."""
        if seconds >= _WAIT_WORTH_TELLING and not self._told_wait:
            self._told_wait = True
            self._line.interrupt(
                f"warning: training waited {seconds:.1f} s for the checkpoint before this one to be written; a larger "
                "--checkpoint-every waits less"
            )

    def evaluated(self, done: int, evaluation: Evaluation) -> None:
        """Write an evaluation after `done` steps, in a row of its own. Its time is no step's."""
        seconds, self._last = time.monotonic() - self._last, time.monotonic()
        self._started += seconds
        row: Row = {
            "step": done - 1,
            "eval_loss": _number(evaluation.loss),
            "eval_samples": evaluation.samples,
            "eval_s": round(seconds, 6),
        }
        self._write(row)
        self._line.interrupt(f"step {done}: evaluation loss {evaluation.loss:.4f} over {evaluation.samples} samples")

    def overlapped(self, done: int, overlap: Overlap) -> None:
        """Write the messages of a run that was traced, in a row of its own."""
        if overlap.hidden is None:
            return
        row: Row = {
            "step": done - 1,
            "messages": overlap.messages,
            "messages_s": round(overlap.moving, 6),
            "waited_s": round(overlap.waited, 6),
            "hidden": round(overlap.hidden, 4),
        }
        self._write(row)
        self._line.interrupt(
            f"messages: {overlap.messages}, {overlap.moving:.3f} s under way, of which ranks waited "
            f"{overlap.waited:.3f} s: "
            f"{overlap.hidden:.0%} hidden"
        )

    def exchanged(self, done: int, totals: Sequence[CollectiveTotal]) -> None:
        """Write the collectives of a run that was traced, in a row of its own."""
        if not totals:
            return
        row: dict[str, float | int | str | None] = {"step": done - 1}
        for name, total in by_name(totals).items():
            row |= {
                name: total.count,
                f"{name}_bytes": total.nbytes,
                f"{name}_s": round(total.seconds, 6),
                f"{name}_exposed_s": round(total.exposed, 6),
            }
            self._line.interrupt(
                f"{total.kind} over {', '.join(total.over)}: {total.count}, {shown_bytes(total.nbytes)}, "
                f"{total.seconds:.3f} s under way, of which ranks waited {total.exposed:.3f} s"
            )
        self._write(row)

    def copied(self, done: int, copies: Sequence[CopyTimes]) -> None:
        """Write the copies between memory spaces of a run that was traced, in a row of its own."""
        row: dict[str, float | int | str | None] = {"step": done - 1}
        for kind, name in ((COPY_IN, "copies_in"), (COPY_OUT, "copies_out")):
            listed = [copy for copy in copies if Action.parse(copy.text).kind == kind]
            nbytes, moving, waited = (
                sum(amounts)
                for amounts in (
                    [copy.nbytes for copy in listed],
                    [copy.ended - copy.begun for copy in listed],
                    [copy.waited for copy in listed],
                )
            )
            row |= {
                name: len(listed),
                f"{name}_bytes": nbytes,
                f"{name}_s": round(moving, 6),
                f"{name}_waited_s": round(waited, 6),
            }
            if listed:
                self._line.interrupt(
                    f"{name.replace('_', ' ')}: {len(listed)}, {shown_bytes(int(nbytes))}, {moving:.3f} s under way, "
                    f"of which ranks waited {waited:.3f} s"
                )
        if copies:
            self._write(row)

    def on_devices(self, done: int, used: Sequence[int], captured: Sequence[int]) -> None:
        """Write the memory of GPUs that was in use, and what captured calls keep of it, in a row of their own. Both
        have 0 for ranks without any."""
        row: Row = {f"rank{rank}_gpu_bytes": nbytes for rank, nbytes in enumerate(used) if nbytes}
        keeps: Row = {f"rank{rank}_captured_bytes": nbytes for rank, nbytes in enumerate(captured) if nbytes}
        if row:
            self._write({"step": done - 1, **row, **keeps})

    def _write(self, row: Row) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
            except OSError as error:
                raise self._unwritable(error) from error
        self._sinks.add(row)

    def close(self) -> None:
        self._line.close()
        self._sinks.close()
        if self._file is not None:
            # Every line was flushed; a line that could not be written was reported then.
            with contextlib.suppress(OSError):
                self._file.close()

    @property
    def seconds(self) -> float:
        return self._last - self._started

    @property
    def samples_per_second(self) -> float:
        return len(self.losses) * self._samples / max(self._last - self._started, 1e-9)

    def _unwritable(self, error: OSError) -> PenstockError:
        return PenstockError(f"cannot write the metrics: {error}", where=str(self._path))

    def _show(self, step: Step, *, last: bool) -> None:
        if not (last or len(self.losses) == 1 or self._line.due):
            return
        left = (self._total - step.step - 1) * (self._last - self._started) / len(self.losses)
        parts = [
            f"step {step.step + 1}/{self._total}",
            f"loss {step.loss:.4f}",
            f"{self.samples_per_second:.1f} samples/s",
        ]
        parts += [self._busy.text() if self._busy is not None else "", f"{format_seconds(left)} left"]
        self._line.show("  ".join(filter(None, parts)))


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def format_seconds(seconds: float) -> str:
    rounded = round(seconds)
    hours, minutes = rounded // 3600, rounded // 60 % 60
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rounded % 60:02}s" if minutes else f"{rounded}s"


def _open(path: Path, first: int) -> IO[str]:
    """Open a file for rows from step `first` on. One run at a time writes it: the lock ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written at its end, wherever others may have moved that.
    file = path.open("a+", encoding="utf-8") if path.is_file() or not path.exists() else path.open("w")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    if not _lock(file):
        file.close()
        raise UsageError(
            "another run writes its metrics there", where=f"--metrics {path}", hint="give each run a file of its own"
        )
    earlier_rows = _rows_before(path, first)
    file.truncate(0)
    file.write(earlier_rows)
    file.flush()
    return file


def _lock(file: IO[str]) -> bool:
    """Lock a file for this process. The start of this run before this one may still be ending."""
    end = time.monotonic() + _HANDOVER_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
        except OSError:
            return True  # a file system without locks
        else:
            return True


def _rows_before(path: Path, first: int) -> str:
    """Return the rows of a file without those of steps from `first` on, which run again, and without a torn line."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if first else ():
        try:
            if int(json.loads(line)["step"]) < first:
                rows.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    return "".join(rows)
