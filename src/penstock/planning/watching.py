"""The feedback that planning gives its caller: a watcher of passes, code and results, progress, and words for people.

`penstock.inspection.dump.Dump` is such a watcher. It is not imported here: planning does not know what becomes of what
it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from penstock.backends.interface import Viewer
from penstock.ir.graph import Module
from penstock.passes.manager import Watcher

from .predict import Predicted

# done, total, the current case
ProgressHook = Callable[[int, int, str], None]


class PlanWatcher(Watcher, Viewer, Protocol):
    """A watcher of passes and of back ends that is shown the results of planning, too."""

    def write(self, name: str, text: str) -> str:
        """Store a text under a name."""

    def program(self, module: Module, predicted: Callable[[], Predicted] | None = None) -> None:
        """Store a module that went through all passes; `predicted` returns the prediction of the simulator."""

    def report(self, module: Module, plan: Mapping[str, Any] | None = None, predicted: Predicted | None = None) -> None:
        """Write the report, when all else is there."""


@dataclass(frozen=True)
class Feedback:
    """The feedback that a caller wants of planning: all of it, how far it is, and lines for people."""

    watcher: PlanWatcher | None = None
    progress: ProgressHook | None = None
    say: Callable[[str], None] = lambda line: None

    def step(self, name: str) -> AbstractContextManager[list[str]]:
        """Begin a step that a watcher writes down, where there is one; the list takes the lines that are said in it."""
        return nullcontext([]) if self.watcher is None else self.watcher.step(name)

    def told(self, progress: Callable[[ProgressHook], ProgressHook]) -> Feedback:
        """Return this feedback with another display of progress, where progress is shown at all."""
        return self if self.progress is None else replace(self, progress=progress(self.progress))

    def of_trial(self, name: str) -> Feedback:
        """Return the feedback of a trial with a name, of which planning has several: its progress, but not its end."""
        return Feedback(progress=self.progress).told(partial(_without_end, name))


def _without_end(name: str, progress: ProgressHook) -> ProgressHook:
    def tell(done: int, total: int, what: str) -> None:
        if done < total:
            progress(done, total, f"{what} ({name})")

    return tell


SILENT = Feedback()
