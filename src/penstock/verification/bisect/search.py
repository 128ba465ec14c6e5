"""The search for a fault: first the import, then passes by halves, then kernels stage by stage.

It prints the first fault, and leaves it as a reproducer.

In: a Trail (sources.py), options. Out: tables and lines on standard output, exit code 0, or VerifyError. A fault of one
pass stays in later modules, so that log2(n) of n modules are run. All values after the faulty pass are compared with
those before it, graph by graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from penstock.ir.graph import Module
from penstock.ir.interpreter.ops import Array
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.support.errors import PenstockError, VerifyError
from penstock.support.terminal import say, table
from penstock.support.words import counted
from penstock.verification.bisect import reproducer
from penstock.verification.inputs import batches_of
from penstock.verification.parts import PartOff, PartsComparison
from penstock.verification.rungs import first_off

from .kernels import KernelVerdict, first_kernel
from .original import OnnxOriginal, first_difference
from .shrinking import Budget
from .steps import WRITTEN, CompiledRung, Original, Trail
from .trial import Off, Trial, can_run, is_whole, microbatches_per_batch
from .values import Errors, Spot

Problems = dict[int, Off | PenstockError | None]


@dataclass(frozen=True)
class Options:
    """The options of a search.

    `repro` is the place of the reproducer, `shrink` the seconds for making it smaller. `data` are the inputs, which are
    drawn where it is None.
    """

    steps: int = 3
    seed: int = 0
    tolerance: float | None = None
    repro: Path | None = None
    shrink: float = 60.0
    data: str | None = None


def bisect(trail: Trail, options: Options) -> int:
    """Report the first thing that goes wrong; raise VerifyError if there is one."""
    search = _TrailSearch(trail, options)
    search.look_at_import()
    search.look_at_passes()
    if trail.refused is not None:
        search.tell_refusal(*trail.refused)
    search.look_at_kernels()
    print(f"nothing changes what {trail.steps[0].module.name} computes: {', '.join(search.looked)}")
    return 0


class _TrailSearch:
    """The state of one search: the trail, the trials of its modules, and a record of what was compared."""

    def __init__(self, trail: Trail, options: Options) -> None:
        self.trail, self.options = trail, options
        # Drawn weights show more than those of a fresh model, whose biases are zero and whose numbers are small; but
        # the model's own weights decide.
        count = microbatches_per_batch(trail.steps)
        batches = batches_of(trail.steps[0].module, options.steps, count, options.seed, options.data, trail.renamed)
        self.trial = Trial(trail.steps, options.steps, options.seed, options.tolerance, batches=batches)
        self.model_trial = (
            Trial(trail.steps, options.steps, options.seed, options.tolerance, trail.weights, batches)
            if trail.weights
            else self.trial
        )
        self.looked: list[str] = []

    # -------------------------------------------------------------------------------------------- import

    def look_at_import(self) -> None:
        """Compare the import with its framework."""
        original, first = self.trail.original, self.trail.steps[0]
        if original is None:
            return
        part = {v.name: self.trial.parts[0][v.name] for v in first.module.data_inputs}
        names = {v.name for v in first.module.inputs} - part.keys()
        compared = first_difference(
            original,
            first.module,
            self.model_trial.weights,
            {**part, **{n: self.trial.parts[0][n] for n in names}},
            self.options.tolerance,
        )
        rows = [
            [
                original.name,
                first.name,
                compared.count,
                f"{compared.errors.largest:.1e}",
                _judged(compared.errors, compared.first),
            ]
        ]
        print(table(["original", "import", "values", "largest error", "verdict"], rows))
        self.looked.append(f"{counted(compared.count, 'value')} as in {original.name}")
        spot = compared.first
        if spot is not None:
            print("\n".join(["first wrong: the import", *spot.lines()]))
            what = f"the import of {self.trail.name} computes something else than {original.name}"
            self._fail(what, lambda budget: self._of_import(original, spot, part, budget))

    def _of_import(
        self, original: Original, spot: Spot, inputs: Mapping[str, Array], budget: Budget
    ) -> reproducer.Written | None:
        if not isinstance(original, OnnxOriginal):
            return None
        assert self.options.repro is not None
        return reproducer.of_import(self.options.repro, original, spot, inputs, self.options.tolerance, budget)

    def _source_of(self, spot: Spot) -> str:
        """Return what the model calls the maker of a value; nothing where only passes made it."""
        return "" if self.trail.original is None else self.trail.original.source_of(spot.tensor.lstrip("%"))

    # -------------------------------------------------------------------------------------------- passes

    def look_at_passes(self) -> None:
        """Search the passes with drawn weights, and with the model's own where these still show a fault."""
        self._look_at_passes(self.trial)
        last = [step.module for step in self.trail.steps if can_run(step.module)][-1]
        if self.model_trial is not self.trial and self.model_trial.problem(last) is not None:
            say("with drawn weights all is well, with the model's own weights it is not")
            self.trial = self.model_trial
            self._look_at_passes(self.model_trial)
        if gaps := sorted(self.trial.gaps & self.model_trial.gaps):
            print(
                f"cannot tell on these inputs: no element of {', '.join(gaps[:5])} is finite; --data FILE has inputs "
                "of your own, --seed N draws others"
            )

    def _look_at_passes(self, trial: Trial) -> None:
        steps = self.trail.steps
        high, problems = self._halves(trial)
        print(
            table(
                ["module", "verdict"], [[steps[i].name, _verdict(problem)] for i, problem in sorted(problems.items())]
            )
        )
        self.looked.append(f"{len(problems)} of {counted(len(steps), 'module')}")
        problem, culprit = problems[high], steps[high]
        if problem is None:
            return
        if not high:
            raise VerifyError(f"the model itself is wrong: {problem}", where=culprit.name)
        before = steps[high - 1]
        print(f"first wrong after: {culprit.call}\n  {problem}")
        if not can_run(before.module):
            print(f"  or after {before.call}: what that makes cannot be run before weights have versions")
        part = self._off_part(trial, high)
        # Values of one device are no values of the module before.
        spots = [] if culprit.module.is_local else trial.spots(culprit.module, before.module)
        _tell_graphs(spots)
        if spots:
            print("\n".join(spots[0].lines(self._source_of(spots[0]))))
        elif part is not None:
            print(f"  {part}")
        elif isinstance(problem, Off):
            print(
                "  all values that have the same name in the module before are right: what is wrong has a name "
                "of its own, or came later"
            )
        if edited := self._edited(high):
            what = f"{culprit.name} is not what {culprit.call} makes of {before.name} here"
            self._fail(f"{what}: {edited} was edited, or another version wrote it", None)
        self._fail(
            f"{culprit.call if culprit.call == WRITTEN else f'pass {culprit.call}'} changes what "
            f"{steps[0].module.name} computes",
            lambda budget: self._of_pass(high, problem, spots, budget),
        )

    def _off_part(self, trial: Trial, at: int) -> PartOff | None:
        """Return the first value of a module in local form that ranks have wrong, beside the last whole program."""
        module = self.trail.steps[at].module
        whole = next((step.module for step in self.trail.steps[at::-1] if is_whole(step.module)), None)
        if not module.is_local or module.schedule is None or whole is None:
            return None
        try:
            return PartsComparison(module, whole).first_off(trial.weights, trial.batches[0], self.options.seed)
        except VerifyError as error:
            say(f"values of ranks are not compared: {error}")
            return None

    def _edited(self, at: int) -> str:
        """Name the dump that its pass did not write, where the one at `at` is not the result of its pass; else return
        nothing.

        A dump that was edited fits neither neighbour, so that the neighbours say which of the two it is.
        """
        steps = self.trail.steps
        if not self._is_strange(at):
            return ""
        if at > 1:
            return steps[at - 1].name if self._is_strange(at - 1) else steps[at].name
        fits_next = at + 1 < len(steps) and not self._is_strange(at + 1)
        return f"{steps[0].name}, or all after it," if fits_next else "one of the two"

    def _is_strange(self, at: int) -> bool:
        """Return whether a dump is not the result of its pass: then the effect of the pass is unknown."""
        before, step = self.trail.steps[at - 1 : at + 1]
        if step.call == WRITTEN:
            return False
        try:
            result = run_passes(before.module, parse_pipeline(step.call, PASSES), PASSES)
        except PenstockError:
            return True
        return replace(result, notes=()) != replace(step.module, notes=())

    def _halves(self, trial: Trial) -> tuple[int, Problems]:
        """Return the first module that is wrong (the last one, if none is), and the verdicts on the way."""
        steps = self.trail.steps
        # The other modules are skipped: their faults show in the next one.
        runnable = [i for i, step in enumerate(steps) if can_run(step.module)]
        problems: Problems = {}

        def is_bad(place: int) -> bool:
            i = runnable[place]
            if i not in problems:
                say(f"running {steps[i].name}")
                problems[i] = trial.problem(steps[i].module)
            return problems[i] is not None

        # The module that all later ones are compared with is judged first.
        judge = next((place for place, i in enumerate(runnable) if steps[i].module is trial.trained), len(runnable) - 1)
        high = judge if is_bad(judge) else len(runnable) - 1
        low = -1 if is_bad(0) else 0
        while is_bad(high) and high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_bad(middle) else (middle, high)
        return runnable[high], problems

    def _of_pass(self, at: int, problem: object, spots: list[Spot], budget: Budget) -> reproducer.Written | None:
        if not isinstance(problem, Off) or self.trail.steps[at].call == WRITTEN:
            return None
        base, passes = self._from_whole(at)
        spot, options = spots[0] if spots else None, self.options
        assert options.repro is not None
        return reproducer.of_pass(
            options.repro, base, passes, self.trial, spot, options.seed, options.tolerance, budget
        )

    def _from_whole(self, at: int) -> tuple[Module, str]:
        """Return the last module before a pass that is not cut into stages yet, and the passes from there."""
        steps = self.trail.steps
        start = max(i for i in range(at) if is_whole(steps[i].module) and not steps[i].module.stages)
        return steps[start].module, ",".join(step.call for step in steps[start + 1 : at + 1])

    # -------------------------------------------------------------------------------------------- refusals

    def tell_refusal(self, call: str, error: PenstockError) -> NoReturn:
        """Report the refusal of a pass, and leave a reproducer."""
        print(f"refused by the verifier after: {call}\n  {str(error).splitlines()[0]}")
        if self.options.repro is not None:
            base, passes = self._from_whole(len(self.trail.steps))
            steps = ",".join(filter(None, [passes, call]))
            written = reproducer.of_refusal(
                self.options.repro, base, steps, self.trial.weights, error, Budget(self.options.shrink)
            )
            print("\n".join(written.lines()))
        raise error

    # -------------------------------------------------------------------------------------------- kernels

    def look_at_kernels(self) -> None:
        """Compare the compiled kernels with the interpreter."""
        module, program = self.trail.steps[-1].module, self.trail.compiled
        if program is None or program.backend == "numpy" or module.schedule is None:
            return
        verdicts = first_kernel(module, program, self.trial.weights, self.trial.batches, self.options.tolerance)
        if self.model_trial is not self.trial and verdicts[-1].first is None:
            verdicts = first_kernel(
                module, program, self.model_trial.weights, self.trial.batches, self.options.tolerance
            )
        print(table(["stage", "graphs", "largest error", "verdict"], [_row(verdict) for verdict in verdicts]))
        self.looked.append(f"graphs of {counted(len(verdicts), 'stage')} compiled by {program.backend}")
        self._judge_kernels(verdicts[-1], "")
        self._look_at_rungs()

    def _look_at_rungs(self) -> None:
        """Compare the programs of smaller sizes with the model, and their kernels, on inputs drawn for each."""
        rows: list[list[object]] = []
        for rung in self.trail.rungs:
            say(f"running {rung.sizes}")
            batches = batches_of(rung.module, 1, self.trial.microbatches, self.options.seed, None)
            weights = self.model_trial.weights
            self._judge_program(rung)
            verdicts = first_kernel(rung.module, rung.compiled, weights, batches, self.options.tolerance)
            rows += [[rung.sizes, *_row(verdict)] for verdict in verdicts]
            if verdicts[-1].first is not None:
                break
        else:
            verdicts = []
        if rows:
            print(table(["sizes", "stage", "graphs", "largest error", "verdict"], rows))
            self.looked.append(f"of {counted(len(self.trail.rungs), 'smaller size')}")
        if verdicts:
            self._judge_kernels(verdicts[-1], f" at {rung.sizes}")

    def _judge_program(self, rung: CompiledRung) -> None:
        """Report the first value of a smaller size's program that is not that of the model."""
        first, options = self.trail.steps[0], self.options
        if not is_whole(first.module):
            return
        spot = first_off(first.module, rung.module, self.model_trial.weights, options.seed, options.tolerance)
        if spot is None:
            return
        print("\n".join([f"first wrong at {rung.sizes}: its program", *spot.lines(self._source_of(spot))]))
        self._fail(f"the program of {rung.sizes} computes something else than {first.name}", None)

    def _judge_kernels(self, last: KernelVerdict, sizes: str) -> None:
        """Report the first kernel that is off, of the largest size or of others."""
        if last.first is None:
            return
        first = f"first wrong{sizes}: {last.first.kernel or 'the graph @' + last.first.graph}"
        print("\n".join([first, *last.first.lines(self._source_of(last.first))]))
        if last.alone is None:
            print(
                "  each kernel of it, compiled now by itself, is right: its code is older, or what is wrong is "
                "their order or memory"
            )
        self._fail(
            f"{last.first.tensor} of stage {last.stage}{sizes} is not what the interpreter gives",
            None if sizes else lambda budget: self._of_kernel(last, budget),
        )

    def _of_kernel(self, verdict: KernelVerdict, budget: Budget) -> reproducer.Written | None:
        assert self.options.repro is not None
        assert self.trail.compiled is not None
        assert verdict.first is not None
        if verdict.alone is None or self.trail.steps[-1].module.is_local:
            return None
        module, options = self.trail.steps[-1].module, self.options
        return reproducer.of_kernel(
            self.options.repro,
            module,
            verdict.alone,
            verdict.first,
            self.trail.compiled.backend,
            options.tolerance,
            budget,
        )

    # -------------------------------------------------------------------------------------------- the end

    def _fail(self, what: str, leave: Callable[[Budget], reproducer.Written | None] | None) -> NoReturn:
        hint = ""
        if self.options.repro is not None and leave is not None:
            written = leave(Budget(self.options.shrink))
            if written is not None:
                print("\n".join(written.lines()))
                hint = written.shell
        raise VerifyError(what, where=self.trail.name, hint=hint)


def _tell_graphs(spots: list[Spot]) -> None:
    """Print, stage by stage, the first wrong value of each graph."""
    first: dict[str, Spot] = {}
    for spot in spots:
        first.setdefault(spot.graph, spot)
    rows = [
        ["-" if s.stage is None else s.stage, f"@{s.graph}", f"{s.tensor} of {s.unit}", f"{s.error:.2g}"]
        for s in first.values()
    ]
    if len(rows) > 1:
        print(table(["stage", "graph", "first value that is off", "error"], rows))


def _row(verdict: KernelVerdict) -> list[object]:
    outcome = verdict.passed_over or _judged(verdict.errors, verdict.first)
    return [verdict.stage, verdict.graphs, f"{verdict.errors.largest:.1e}", outcome]


def _judged(errors: Errors, first: Spot | None) -> str:
    return errors.verdict if first is None else f"{first.tensor} is off by {first.error:.2g}"


def _verdict(problem: Off | PenstockError | None) -> str:
    return "ok" if problem is None else str(problem).splitlines()[0]
