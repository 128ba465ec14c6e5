"""The changes that passes made to some operations.

In: a Subject and a Target. Out: one PassChange for every pass that changed it, with the lines of `penstock diff`.

    a dump folder    the modules in it, one after another
    a bundle         the passes run again, from the model before it was cut (reference.ir), with the pipeline that
                     plan.json names

Only the operations of the target, their variables and the edges that carry their results are compared. Limits: passes
before `partition` are seen in dump folders only; `schedule` and the passes that work on actions change no operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.inspection.dump_reading import made_again
from penstock.ir.graph import Edge, Graph, Module
from penstock.ir.text import print_module
from penstock.support.errors import PenstockError

from .diff import differences
from .finding import VARIABLE, Target, look_up
from .subject import Subject

_ASK = "give --dumps, the folder of `penstock compile --dump-ir`"
# The lines around the operations of a graph: they say nothing of graphs that hold only the target.
_FRAME = re.compile(r"\s*[-+] (?:graph @\S+\(\) \{|return)")


@dataclass(frozen=True)
class Snapshot:
    """The module after a pass. The first one is the input of the pipeline."""

    number: int
    call: str
    module: Module


@dataclass(frozen=True)
class PassChange:
    """The change that one pass made to a target.

    `made` says that the target was new, `removed` that the pass removed it.
    """

    number: int
    call: str
    lines: tuple[str, ...]
    made: bool = False
    removed: bool = False


@dataclass(frozen=True)
class PipelineRecord:
    """The modules of a pipeline, in order. `origin` says in words where they come from and what is missing."""

    origin: str
    snapshots: tuple[Snapshot, ...] = ()


def record_of(subject: Subject) -> PipelineRecord:
    """Return the best record there is of how a module was made."""
    if subject.dumps:
        folder = subject.dumps[0].path.parent
        snapshots = tuple(Snapshot(dump.number, dump.call, dump.module) for dump in subject.dumps)
        differs = subject.path != folder and print_module(snapshots[-1].module) != print_module(subject.module)
        warning = "; its last module is not this program, so it may be of another compilation" if differs else ""
        warning += (
            "; of the passes it has what they changed in place of modules (*.diff)"
            if any(folder.glob("*_*.diff"))
            else ""
        )
        return PipelineRecord(f"passes as dumped in {folder}{warning}", snapshots)
    reference = subject.bundle.reference if subject.bundle is not None else None
    if reference is None or "pipeline" not in subject.plan:
        return PipelineRecord(f"what passes did is not known: {_ASK}")
    return _run_again(subject, reference, str(subject.plan["pipeline"]))


def _run_again(subject: Subject, reference: Module, pipeline: str) -> PipelineRecord:
    try:
        steps = made_again(reference, pipeline)
    except PenstockError as error:
        return PipelineRecord(
            "what passes did is not known: those that plan.json names do not run today: "
            f"{str(error).splitlines()[0]} ({_ASK})"
        )
    if not steps:
        return PipelineRecord(
            "what passes did is not known: plan.json names no `partition`, which the model in the bundle "
            f"stands before ({_ASK})"
        )
    origin = (
        f"passes from {steps[0].call.name} on, run again from reference.ir; of those before only a dump folder "
        "knows (--dumps)"
    )
    if print_module(steps[-1].module.but(notes=())) != print_module(subject.module.but(notes=())):
        origin += "; they give another program than the bundle has, as another version of them made it"
    before = Snapshot(steps[0].number - 1, "", reference)
    return PipelineRecord(origin, (before, *(Snapshot(step.number, str(step.call), step.module) for step in steps)))


# ------------------------------------------------------------------------------------------------ following


def find_before(record: PipelineRecord, text: str) -> Target | None:
    """Look a name up in the last module that had it."""
    targets = (look_up(snapshot.module, text) for snapshot in reversed(record.snapshots))
    return next((target for target in targets if target is not None), None)


def changes(record: PipelineRecord, target: Target) -> tuple[PassChange, ...]:
    """Return the changes that every pass made to a target."""
    views = [(snapshot, _only(snapshot.module, target.within(snapshot.module))) for snapshot in record.snapshots]
    changed = []
    for (_, before), (snapshot, after) in pairwise(views):
        lines = tuple(line for line in differences(before, after) if not _FRAME.fullmatch(line))
        if lines:
            changed.append(
                PassChange(snapshot.number, snapshot.call, lines, made=not before.graphs, removed=not after.graphs)
            )
    return tuple(changed)


def _only(module: Module, target: Target) -> Module:
    """Return a module of nothing but the target."""
    graphs: dict[str, Graph] = {}
    for place in target.places:
        graph = graphs.get(place.graph, Graph(place.graph, (), (), ()))
        graphs[place.graph] = replace(graph, ops=(*graph.ops, place.op))
    results = {v.name for place in target.places for v in place.op.outs}
    touched = {str(place.op.attrs["var"]) for place in target.places if "var" in place.op.attrs}
    touched |= {target.name} if target.kind == VARIABLE else set()
    names = [name for name in module.vars if name in touched]
    return Module(
        module.name,
        vars={name: module.vars[name] for name in names},
        graphs=graphs,
        edges=tuple(_edges(module.edges, results)),
    )


def _edges(edges: Sequence[Edge], names: set[str]) -> Iterable[Edge]:
    for edge in edges:
        kept = [i for i, value in enumerate(edge.values) if value.name in names]
        if kept:
            to = tuple(edge.to[i] for i in kept) if edge.to else ()
            yield replace(edge, values=tuple(edge.values[i] for i in kept), to=to)
