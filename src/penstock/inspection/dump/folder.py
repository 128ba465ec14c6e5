"""The writer of the dump folder, as passes run and steps end.

In: modules, and messages of passes and steps. Out: the files that penstock.inspection.dump lists.

Without a folder, changes are printed on stderr and nothing is written. An older dump in the folder is removed first;
other files stay (files.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.backends.interface import StageSources
from penstock.inspection.diff import differences
from penstock.inspection.dump_reading import EXCERPT, PASSES, REPRO
from penstock.inspection.report.material import Material, PassStep
from penstock.ir.graph import Module
from penstock.ir.text import Printer, print_op
from penstock.passes.manager import Call, Event, count_ops
from penstock.planning.predict import Predicted
from penstock.support.errors import UsageError
from penstock.support.gc_pause import nothing_collected
from penstock.support.terminal import say_as_is
from penstock.support.words import counted

from .files import Files
from .parts import excerpt
from .program import STAGES, dump_program

EVENTS = "events.jsonl"
_HEADER = "number\tpass\tms\tops_before\tops_after\tchanged\trest\n"


class Dump:
    """A folder into which `penstock.plan` and `penstock.compile` write the output of every pass and step.

    `--dump-ir` uses it. Without a folder, changes are printed.
    """

    # A watcher of planning (penstock.planning.watching), with its passes and back ends.
    def __init__(self, folder: str | Path | None, *, only: str | None = None, changed: bool = False) -> None:
        """Open a folder for a dump.

        `only` is a pattern of lines FILE @GRAPH OPERATION; `changed` asks for the changes of passes in place of
        modules.
        """
        self.folder = None if folder is None else Path(folder)
        self._only = None if only is None else _pattern(only)
        self._changed = changed
        self._begun = time.perf_counter()
        self._steps: list[str] = []
        self._files: Files | None = None
        self._printer = Printer()
        # For index.html: number, call, ms and result (None where nothing changed) of each pass; sources of kernels by
        # graph and kernel, and of whole stages by file.
        self.passes: list[tuple[int, str, float | None, Module | None]] = []
        self.kernels: dict[str, str] = {}
        self.programs: dict[str, str] = {}
        if self.folder is not None:
            self._files = Files(self.folder)

    # ------------------------------------------------------------------------------ steps

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Record a step of compiling; the caller puts its messages into the list."""
        messages: list[str] = []
        started = time.perf_counter()
        try:
            yield messages
        except Exception as error:
            messages.append(f"failed: {error}")
            raise
        finally:
            took = time.perf_counter() - started
            self._steps.append(
                self._log({"event": "step", "name": name} | self._times(started, took * 1e3) | {"said": messages})
            )

    def _times(self, started: float, ms: float) -> dict[str, float]:
        return {"start": round(started - self._begun, 6), "ms": round(ms, 3)}

    def _log(self, event: dict[str, Any]) -> str:
        line = json.dumps(event, ensure_ascii=False) + "\n"
        self._append(EVENTS, line)
        return line

    # ------------------------------------------------------------------------------ passes

    @nothing_collected()
    def begin(self, module: Module, calls: str) -> None:
        """Start recording passes. Planning may begin again: then only the last time is kept."""
        self.passes = [(0, "input", None, module)]
        if self._files is None:
            return
        self._files.clear()
        self.write(EVENTS, "".join(self._steps))
        self.write(PASSES, f"{_HEADER}0\tinput\t0\t0\t{count_ops(module)}\tyes\t{calls}\n")
        self.write_module("00_input.ir", module)

    @nothing_collected()
    def passed(self, event: Event, name: str, before: Module, after: Module) -> None:
        self.passes.append((event.number, event.call, event.ms, after if event.changed else None))
        file = self._write_pass(f"{event.number:02d}_{name}", before, after) if event.changed else None
        changed = "yes" if event.changed else "no"
        self._append(
            PASSES,
            f"{event.number}\t{event.call}\t{event.ms:.1f}\t{event.ops_before}\t{event.ops_after}\t"
            f"{changed}\t{event.remaining}\n",
        )
        facts = asdict(event)
        messages = [note.text for note in after.notes[len(before.notes) :]]
        times = self._times(facts.pop("started"), facts.pop("ms"))
        remaining = facts.pop("remaining")
        self._log(
            {"event": "pass", "name": name} | times | {"said": messages} | facts | {"file": file, "rest": remaining}
        )

    def _write_pass(self, stem: str, before: Module, after: Module) -> str | None:
        if not self._changed:
            return self.write_module(f"{stem}.ir", after)
        lines = list(differences(self.filtered(stem, before), self.filtered(stem, after)))
        if not lines:
            return None
        if self.folder is None:
            say_as_is("\n".join([f"--- {stem}", *lines]))
            return None
        return self.write(f"{stem}.diff", "\n".join(lines) + "\n")

    def failed(self, module: Module, call: Call, error: Exception) -> None:
        """Write the reproducer: the whole module, whatever the filter leaves out elsewhere."""
        quoted = str(call).replace("'", "'\\''")
        reason = "".join(f"// {line}\n" for line in f"{type(error).__name__}: {error}".splitlines())
        if self.folder is not None:
            self.write(REPRO, f"// penstock opt {REPRO} -p '{quoted}'\n{reason}{self._printer.print(module)}")
            self.report(module, failure=f"pass {call}\n{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------ the plan

    def program(self, module: Module, predicted: Callable[[], Predicted] | None = None) -> None:
        """Write the parts of a planned module, and a picture of its run."""
        dump_program(self, module, predicted)

    def report(
        self,
        module: Module,
        plan: Mapping[str, Any] | None = None,
        predicted: Predicted | None = None,
        failure: str = "",
    ) -> None:
        """Write index.html with everything recorded so far, whatever the filter leaves out elsewhere."""
        from penstock.inspection.report.page import page_of  # lazy: heavy

        steps = tuple(PassStep(*row) for row in self.passes)
        if self.folder is not None:
            material = Material(
                module,
                steps,
                plan or {},
                sources=self.kernels,
                programs=self.programs,
                failure=failure,
                predicted=predicted,
            )
            self.write("index.html", page_of(material, plain=True))

    # ------------------------------------------------------------------------------ sources

    @nothing_collected()
    def sources(self, stage: str, stage_sources: StageSources) -> None:
        """Write the sources that a back end made for a stage."""
        home = f"{STAGES}/{stage}"
        self.kernels |= {
            f"{call.graph}/{call.kernel}": stage_sources.kernels[call.source]
            for call in stage_sources.calls
            if call.source in stage_sources.kernels
        }
        texts = {"relax.py": stage_sources.functions, "kernels.cu": stage_sources.device}
        self.programs |= {f"{stage}/{name}": text for name, text in texts.items() if text}
        calls = [
            call
            for call in stage_sources.calls
            if any(self.wants(f"{home}/kernels/{call.source}", call.graph, operation) for operation in call.operations)
        ]
        if not calls:
            return
        rows = [
            f"{call.graph}\t{call.kernel}\tkernels/{call.source}.py\t{', '.join(call.operations)}\n" for call in calls
        ]
        files = {f"{home}/kernels.tsv": "graph\tkernel\tfile\toperations\n" + "".join(rows)}
        # An operation that a library computes has no source.
        files |= {
            f"{home}/kernels/{call.source}.py": stage_sources.kernels[call.source]
            for call in calls
            if call.source in stage_sources.kernels
        }
        files[f"{home}/relax.py"] = f"# for {stage_sources.target}\n{stage_sources.functions}"
        if stage_sources.device:
            files[f"{home}/kernels.cu"] = stage_sources.device
        if self._files is not None:
            self._files.write(files)

    # ------------------------------------------------------------------------------ files

    def wants(self, stem: str, graph: str, operation: str) -> bool:
        """Return whether the line of an operation in a file matches the filter."""
        return self._only is None or self._only.search(f"{stem} @{graph} {operation}") is not None

    def filtered(self, stem: str, module: Module) -> Module:
        """Return the part of a module that goes into a file."""
        if self._only is None:
            return module
        return excerpt(module, lambda graph, op: self.wants(stem, graph, print_op(op)))

    def write_module(self, name: str, module: Module) -> str | None:
        """Write the part of a module that matches the filter; return None where nothing does."""
        if self.folder is None:
            return None
        part = self.filtered(name.removesuffix(".ir"), module)
        if part is module:
            return self.write(name, self._printer.print(module))
        assert self._only is not None
        count = count_ops(part)
        summary = f"{count} of {counted(count_ops(module), 'operation')}, those that match {self._only.pattern}"
        return self.write(name, self._printer.print(part.noted(EXCERPT, summary))) if count else None

    def write(self, name: str, text: str) -> str:
        """Write a file, and the folders that its name needs."""
        if self._files is not None:
            self._files.write({name: text})
        return name

    def _append(self, name: str, text: str) -> None:
        if self._files is not None:
            self._files.append(name, text)


def step_of(dump: Dump | None, name: str) -> AbstractContextManager[list[str]]:
    """Return a step that is recorded in the dump, if there is one."""
    return nullcontext([]) if dump is None else dump.step(name)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"bad pattern {text!r}: {error}", where="--dump-ir-filter") from error
