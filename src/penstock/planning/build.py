"""From a plan to a bundle: machine code for every stage, the weights, and the source of the model.

A bundle keeps as much of its source as is needed to write weights back into it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from penstock.backends.bundle.format import REST, Bundle, Origin, stored_vars
from penstock.backends.bundle.tensor_file import write_tensors
from penstock.backends.bundle.writer import Provenance, write_bundle
from penstock.backends.interface import CompileOptions, all_rungs
from penstock.backends.registry import backend_of
from penstock.frontends.imported import Imported
from penstock.ir.graph import Module
from penstock.ir.interpreter.derived import DerivedWeights
from penstock.ir.ladder.ladder import Ladder

from .options import BuildOptions
from .plan import Plan
from .watching import SILENT, Feedback

_DEFAULTS = BuildOptions()


@dataclass(frozen=True)
class Content:
    """The content of a bundle beside its code: the program, the model before it was cut, weights, and the plan as data.
    `origin` writes what is kept of the source into a folder; `ladder` has the programs of all sizes, if there are
    several. `attachments` are files that travel with the bundle."""

    module: Module
    reference: Module
    weights: Mapping[str, np.ndarray]
    plan: dict[str, Any]
    source_hash: str
    origin: Callable[[Path], Origin | None]
    ladder: Ladder[Module] | None = None
    attachments: Mapping[str, bytes] = field(default_factory=dict)


def build(plan: Plan, out: str | Path, options: BuildOptions = _DEFAULTS, feedback: Feedback = SILENT) -> Path:
    """Compile machine code for every stage, and write the bundle."""
    imported, facts, watcher = plan.model.imported, plan.as_dict(), feedback.watcher
    if watcher is not None:
        watcher.write("plan.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")
    content = Content(
        plan.module,
        plan.reference,
        DerivedWeights(imported.weights, plan.module.vars),
        facts,
        imported.source_hash,
        lambda folder: keep_source(imported, plan.module, folder),
        plan.ladder,
        imported.attachments,
    )
    how = CompileOptions(options.target, options.jobs, feedback.progress, watcher, options.with_runtime)
    bundle = assemble(out, content, options.backend, how)
    if watcher is not None:
        with watcher.step("report"):
            watcher.report(plan.module, facts, plan.predicted)
    return bundle.path


def assemble(out: str | Path, content: Content, backend: str, options: CompileOptions) -> Bundle:
    """Compile all stages, and write them with everything else."""
    module, maker = content.module, backend_of(backend)
    stages = [stage.index for stage in module.stages]
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        whole = module if content.ladder is None else all_rungs(content.ladder)
        names = maker.compile_stages(whole, stages, Path(scratch), options)
        with options.step("bundle") as said:
            bundle = write_bundle(
                out,
                module,
                {stage: [Path(scratch) / name for name in names[stage]] for stage in stages},
                content.weights,
                backend=backend,
                plan=content.plan,
                provenance=Provenance(
                    content.source_hash, content.reference, content.origin(Path(scratch)), content.attachments
                ),
                ladder=content.ladder,
            )
            said.append(str(bundle.path))
    return bundle


# ------------------------------------------------------------------------------------------------ the source


def keep_source(imported: Imported, module: Module, folder: Path) -> Origin:
    """Store parts of the source of `module`: its files, its names for variables, and for inputs and outputs that are
    spelled otherwise; those of other values, too, with a mark."""
    origin = _keep_variables(imported, module, folder)
    values = {*(value.name for value in module.data_inputs), *module.outputs}
    marked = {
        name if name in values else f"%{name}": (theirs,)
        for name, theirs in imported.names.items()
        if name not in module.vars
    }
    return Origin({**marked, **origin.names}, origin.files)


def _keep_variables(imported: Imported, module: Module, folder: Path) -> Origin:
    """Store the names of variables. Elements that no stage holds stay with the structure, which is written into
    `folder`."""
    stored = stored_vars(module)
    # What others were computed from is neither stored nor kept: few bits are to be few bytes.
    rounded = {var.source for var in stored.values() if var.source}
    structure, state = imported.structure, imported.state
    if state is not None:
        lost = {
            name: imported.weights[variable]
            for variable, names in state.names.items()
            if variable not in stored and variable not in rounded
            for name in names
        }
        path = folder / PurePosixPath(REST).name
        write_tensors(path, {**state.unused, **lost})
        return Origin({variable: names for variable, names in state.names.items() if variable in stored}, [path])
    if structure is None:
        return Origin({name: (imported.names.get(name, name),) for name in stored if not stored[name].source})
    from penstock.frontends.onnx.structure import save_structure  # lazy: heavy

    names = {variable: (theirs,) for variable, theirs in structure.initializers.items() if variable in stored}
    unstored = {
        theirs: imported.weights[variable]
        for variable, theirs in structure.initializers.items()
        if variable not in stored and variable not in rounded
    }
    return Origin(names, save_structure(structure, folder, unstored))
