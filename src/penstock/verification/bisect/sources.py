"""The sources of a compilation's modules: a dump folder, a bundle, or a model that is compiled now.

A dump folder has modules and calls but no weights: these are drawn. A bundle has the model before it was cut into
stages, the program, its weights and its source model. The modules between are made again by the passes that its plan
names, and must end in its program. A model is put through the passes here, with its dumps in a folder; a pass that does
not finish is part of the answer.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.interface import all_rungs, graph_on_rung
from penstock.backends.registry import backend_of
from penstock.inspection.dump_reading import EXCERPT, PASSES, dumped_passes, made_again, missing_dumps
from penstock.ir.ladder.bounds import print_sizes
from penstock.support.errors import PenstockError, UsageError, VerifyError
from penstock.support.terminal import say

from .original import OnnxOriginal
from .steps import WRITTEN, CompiledGraphs, CompiledRung, CompiledStages, Original, Trail, TrailStep

if TYPE_CHECKING:
    import torch

    from penstock.backends.bundle.format import Bundle
    from penstock.backends.interface import Exchange, StageProgram
    from penstock.ir.graph import Module
    from penstock.ir.ladder.ladder import Rung
    from penstock.planning.model import Model
    from penstock.planning.plan import Plan


# ------------------------------------------------------------------------------------------------ dump folders


def read_dumps(folder: str | Path) -> list[TrailStep]:
    """Return the modules of a dump folder in the order of the passes."""
    dumps = dumped_passes(folder)
    if not dumps or dumps[0].path.name != "00_input.ir":
        raise UsageError(
            "there is no 00_input.ir", where=str(folder), hint="give a folder that `penstock compile --dump-ir` wrote"
        )
    if any(Path(folder).glob("*.diff")):
        raise UsageError(
            "has changes in place of modules", where=str(folder), hint="dump again without --dump-ir-changed"
        )
    steps = [TrailStep(dump.path.name, dump.call, dump.module) for dump in dumps]
    if any(note.origin == EXCERPT for step in steps for note in step.module.notes):
        raise UsageError("has parts of modules alone", where=str(folder), hint="dump again without --dump-ir-filter")
    if missing := missing_dumps(Path(folder)):
        raise UsageError(
            f"{PASSES} lists what is not there: {', '.join(missing)}", where=str(folder), hint="dump again"
        )
    return steps


@contextmanager
def dumps_trail(folder: Path, backend: str | None) -> Iterator[Trail]:
    """Open the trail of a dump folder."""
    steps = read_dumps(folder)
    with _compiled_now(steps[-1].module, backend) as program:
        yield Trail(str(folder), steps, compiled=program)


# ------------------------------------------------------------------------------------------------ bundles


@contextmanager
def bundle_trail(bundle: Bundle) -> Iterator[Trail]:
    """Open the trail of a bundle."""
    if bundle.reference is None:
        raise UsageError(
            "the bundle holds no reference model to begin with", where=str(bundle.path), hint="compile it again"
        )
    steps = [TrailStep("reference.ir", "", bundle.reference), *_made_again(bundle)]
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        original = _original_of(bundle, Path(scratch))
        yield Trail(
            str(bundle.path),
            steps,
            bundle.weights(),
            original,
            compiled=_Bundled(bundle),
            renamed=bundle.renamed,
            rungs=_smaller_rungs(bundle),
        )


def _made_again(bundle: Bundle) -> Iterator[TrailStep]:
    """Yield the modules of the passes from `partition` on.

    The last one is that of the bundle, whether or not these passes would make it today.
    """
    assert bundle.reference is not None
    try:
        results = made_again(bundle.reference, str(bundle.plan.get("pipeline", "")))
    except PenstockError as error:
        say(f"the passes that the plan names do not run on its model today: {str(error).splitlines()[0]}")
        results = []
    before = bundle.reference
    for number, step in enumerate(results, 1):
        if step.module is not before:
            yield TrailStep(f"{number:02d}_{step.call.name} (made again)", str(step.call), step.module)
        before = step.module
    if results:
        # The plan's own notes are left out of the comparison.
        if replace(before, notes=()) == replace(bundle.module, notes=()):
            return
        say("the passes that the plan names make another program today than the one that the bundle has")
    yield TrailStep("module.ir", WRITTEN, bundle.module)


def _original_of(bundle: Bundle, scratch: Path) -> Original | None:
    """Return the ONNX model in the bundle, with its weights filled in again."""
    if bundle.source_structure is None:
        return None
    from penstock.inspection.exports.weights import export  # lazy: heavy

    path = scratch / "model.onnx"
    try:
        export(bundle.path, onnx=path)
    except UsageError as error:
        say(f"the source model is not compared: {error.what}")
        return None
    names = {ours.removeprefix("%"): theirs[0] for ours, theirs in (bundle.source_names or {}).items() if theirs}
    return OnnxOriginal(path, names)


def _smaller_rungs(bundle: Bundle) -> list[CompiledRung]:
    """Return the rungs below the largest; none of a program in local form, whose ranks have parts of a request."""
    if not bundle.module.bounds or bundle.module.is_local:
        return []
    rungs = [rung for rung in bundle.ladder if rung is not bundle.ladder.largest]
    return [CompiledRung(print_sizes(rung.sizes), rung.held, _Bundled(bundle, rung)) for rung in rungs]


@dataclass(frozen=True)
class _Bundled:
    """The code in a bundle: that of the largest rung, or of another one."""

    bundle: Bundle
    rung: Rung[Module] | None = None

    @property
    def backend(self) -> str:
        return self.bundle.manifest.backend

    def load(self, stage: int, exchange: Exchange | None = None) -> CompiledGraphs:
        module, names = self.bundle.module, dict[str, str]()
        if self.rung is not None:
            module, ladder = all_rungs(self.bundle.ladder), self.bundle.ladder
            names = {name: graph_on_rung(ladder, self.rung, name) for name in self.rung.held.graphs}
        threads = min(rank.threads for rank in self.bundle.manifest.ranks)
        files = self.bundle.stage_files(stage)
        program = backend_of(self.backend).load_stage(module, stage, files, threads, exchange=exchange)
        return _Renamed(program, names)


@dataclass(frozen=True)
class _Renamed:
    """A stage whose code has other names for graphs."""

    program: StageProgram
    names: Mapping[str, str]

    @property
    def device(self) -> torch.device:
        return self.program.device

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.program.call(self.names.get(graph, graph), args)


# ------------------------------------------------------------------------------------------------ models


def model_trail(
    path: str, plan: Callable[[], Plan], load: Callable[[], Model], folder: Path, backend: str | None
) -> AbstractContextManager[Trail]:
    """Open the trail of an ONNX file, whose original is onnxruntime."""

    def original(model: Model) -> Original:
        return OnnxOriginal(Path(path), model.imported.names, model.imported.bound)

    return planned_trail(path, plan, load, original, folder, backend)


@contextmanager
def planned_trail(
    name: str,
    plan: Callable[[], Plan],
    load: Callable[[], Model],
    original: Callable[[Model], Original],
    folder: Path,
    backend: str | None,
) -> Iterator[Trail]:
    """Open the trail of a model that is planned now.

    `plan` runs the passes with dumps in `folder`; `load` returns the model as it is where they did not get to the end.
    """
    try:
        model, refusal = plan().model, None
    except VerifyError as error:
        if not (call := _refused(folder)):
            raise
        model, refusal = load(), (call, error)
    steps = read_dumps(folder)
    with _compiled_now(steps[-1].module, "numpy" if refusal else backend) as program:
        compared = None if model.module.draws else original(model)
        if compared is None:
            say(
                "the model draws random numbers (dropout), and no two runtimes draw the same: its import is "
                "not compared"
            )
        yield Trail(name, steps, model.imported.weights, compared, refusal, program, model.imported.names)


def _refused(folder: Path) -> str:
    """Return the call of the pass that did not finish."""
    try:
        first = (folder / "repro.ir").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return ""
    words = shlex.split(first)
    return words[-1] if words[:2] == ["//", "penstock"] else ""


@dataclass(frozen=True)
class _Compiled:
    """Code made now, in a temporary folder. A loaded library must not be written again, so each stage is made once. It
    is loaded for each caller, whose exchange does its collectives."""

    module: Module
    backend: str
    folder: Path
    made: dict[int, list[Path]] = field(default_factory=dict)

    def load(self, stage: int, exchange: Exchange | None = None) -> StageProgram:
        maker = backend_of(self.backend)
        if stage not in self.made:
            maker.check_host(self.module, stage)
            names = maker.compile_stages(self.module, [stage], self.folder)[stage]
            self.made[stage] = [self.folder / name for name in names]
        return maker.load_stage(self.module, stage, self.made[stage], exchange=exchange)


@contextmanager
def _compiled_now(module: Module, backend: str | None) -> Iterator[CompiledStages | None]:
    """Yield the compiled stages; None where kernels are not asked for, or not chosen yet."""
    if backend == "numpy" or "fused" not in module.facts:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        yield _Compiled(module, backend or "tvm", Path(scratch))
