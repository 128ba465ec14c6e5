"""From a model to a bundle: the three steps that the command line and Python users share.

from_onnx   file -> Model: the module and its weights
from_torch  torch module or exported program -> Model
plan        Model, cluster, training -> Plan: the module after all passes; look at it, print it, throw it away
compile     Plan -> bundle directory
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.ir.attrs import Attr
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.support.errors import UsageError
from penstock.support.words import counted

if TYPE_CHECKING:
    from penstock.arguing import Predicted
    from penstock.frontends.imported import Imported
    from penstock.frontends.training import Training
    from penstock.inspection.dump import Dump
    from penstock.passes.manager import Call
    from penstock.planning import Search

ProgressHook = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Model:
    """A model as it was imported: `imported.module` has one graph, `imported.weights` an array per variable."""

    imported: Imported

    @property
    def module(self) -> Module:
        """The model as a program of one graph, `main`."""
        return self.imported.module

    def __repr__(self) -> str:
        return f"<imported {repr(self.module)[1:]}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the module, without its weights."""
        return self.module._repr_html_()


@dataclass(frozen=True)
class Plan:
    """What will run where. `module` is the program, `reference` the same model before it was cut into stages,
    `search` what the planner did if it chose."""

    model: Model
    module: Module
    reference: Module
    calls: tuple[Call, ...]
    training: Training | None
    search: Search | None = None

    def __repr__(self) -> str:
        from penstock.inspection.notebook import plan_told

        return f"<{plan_told(self.module)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: stages with what is predicted of them, and why; and the module."""
        from penstock.inspection.notebook import plan_html

        return plan_html(self.module)

    @cached_property
    def predicted(self) -> Predicted:
        """What the simulator says of it, by the module alone."""
        from penstock.arguing import predict

        return predict(self.module, plain=True)

    def to_json(self) -> str:
        """The plan as text that `penstock compile --plan` reads back."""
        return json.dumps(self.as_dict(), indent=2, sort_keys=True)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data: the same facts as `notes`, for programs, and what is predicted of it."""
        return describe_plan(self.module, self.reference, self.calls, self.search, self.predicted)


def describe_plan(
    module: Module,
    reference: Module,
    calls: Sequence[Call],
    search: Search | None = None,
    predicted: Predicted | None = None,
) -> dict[str, Any]:
    """A planned module as plain data; `reference` is the model before `partition`, `calls` are all passes, `predicted` is what
    the simulator says of the module alone."""
    from penstock.arguing import planner_facts, predict, predicted_facts
    from penstock.ir.batch_shares import microbatch_size
    from penstock.passes.communicate.wire import WireOptions
    from penstock.passes.manager import print_pipeline
    from penstock.passes.memory.lifetimes import memory_table
    from penstock.passes.memory.recompute import RecomputeOptions
    from penstock.passes.rewrite.precision import PrecisionOptions
    from penstock.placement_hints import stage_starts

    schedule, starts = module.schedule, stage_starts(reference, module)
    assert schedule is not None
    return {
        "model": module.name,
        "pipeline": print_pipeline(calls),
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "samples_per_microbatch": microbatch_size(module),
        "precision": next(
            (call.options.compute for call in calls if isinstance(call.options, PrecisionOptions)), "f32"
        ),
        "wire": next((call.options.dtype for call in calls if isinstance(call.options, WireOptions)), "f32"),
        "recompute": next((call.options.mode for call in calls if isinstance(call.options, RecomputeOptions)), "none"),
        "stages": [
            {
                "stage": s.index,
                "starts_at": starts[s.index],
                "devices": list(module.devices_of(s.index)),
                "shares": schedule.shares(s.index),
            }
            for s in module.stages
        ],
        "memory": {str(rank): dict(row) for rank, row in memory_table(module).items()},
        "notes": [f"{note.origin}: {note.text}" for note in module.notes],
        "predicted": predicted_facts(predicted or predict(module, plain=True)),
        **({} if search is None else {"planner": planner_facts(search)}),
    }


def from_onnx(
    path: str | Path,
    dims: Mapping[str, int] | None = None,
    frozen: str | None = None,
    known: Mapping[str, object] | None = None,
    trained: str | None = None,
) -> Model:
    """Import an ONNX file. `dims` binds symbolic dimensions, `known` inputs to numbers or arrays (a shape, axes, repeats
    that the model takes as inputs); `frozen` is a pattern of parameter names that are not trained, `trained` of those that
    are although they hold a single number."""
    from penstock.frontends.onnx import import_onnx

    return Model(import_onnx(path, dims=dims or {}, known=known or {}, frozen=frozen, trained=trained))


def from_torch(
    source: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    frozen: str | None = None,
) -> Model:
    """Import a program of torch: an nn.Module or torch.fx.GraphModule with example arguments, whose sizes count, or an ExportedProgram.

    `dims` binds symbolic dimensions of an ExportedProgram, by the symbol's name or as INPUT.AXIS; `frozen` is a pattern of parameter names
    that are not trained, like those that do not require a gradient. Weights are copied."""
    from penstock.frontends.torch import import_torch

    return Model(import_torch(source, args, kwargs, dims=dims, frozen=frozen))


def plan(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    *,
    schedule: str = "1f1b",
    stages: int = 0,
    split_at: Sequence[str] = (),
    microbatches: int = 1,
    replicas: int = 1,
    devices: Sequence[Sequence[str]] = (),
    shares: Sequence[Sequence[int]] = (),
    precision: str | None = None,
    recompute: str = "auto",
    cuda_libraries: str = "torch",
    wire: str = "f32",
    hints: bool = True,
    dump: Dump | None = None,
    progress: ProgressHook | None = None,
) -> Plan:
    """Run all passes. Without `training` the plan is for inference. `stages` 0 means one per device. With `replicas` every stage lies on so
    many devices, which share the microbatches of a batch out among them; or `devices` names those of each stage. `shares` are how many of
    the microbatches each of them runs: such that they are done at about the same time if not given. `precision` is f32, bf16 or f16; if it
    is not given, training settings say it. `recompute` says what stages compute again in the backward pass instead of saving it: auto (what
    the memory of their devices asks for), none or all. `cuda_libraries` says who computes contractions on GPUs: torch, which calls the
    vendor's libraries, or none. `wire` is the element type of float32 activations and gradients on their way between stages: f32, bf16 or
    f16. `hints` is whether placement hints of the model are followed, where it has some and `split_at` is not given."""
    from penstock.passes.manager import Call, run_passes
    from penstock.passes.pipelines import PASSES
    from penstock.passes.schedules.dealing import fair_shares
    from penstock.placement_hints import follow_hints

    microbatches = training.microbatches if training is not None else microbatches
    placed = tuple(map(tuple, devices)) or _in_groups(cluster, stages, replicas)
    fair = shares or [fair_shares([cluster.device(n).flops for n in names], microbatches) for names in placed]
    dealt = tuple(share for of_stage in fair for share in of_stage)
    named = tuple(" ".join(names) for names in placed)
    cuts: dict[str, Attr] = {"stages": stages, "split_at": tuple(split_at), "devices": named, "shares": dealt}
    module, calls = _pipeline(
        model, cluster, training, cuts, schedule, microbatches, precision, recompute, cuda_libraries, wire
    )
    seen: list[Module] = []
    made: list[Call] = []
    notes: list[str] = []

    def look(call: Call, before: Module) -> Call:
        if call.name == "partition":
            seen.append(before)
            count = len(placed) or stages or len(cluster.devices)
            if hints and model.imported.hints and not split_at and count > 1:
                changes, told = follow_hints(model.imported.hints, before, count)
                call = Call(call.name, replace(call.options, **changes))
                notes.extend(told)
        made.append(call)
        return call

    done = run_passes(module, calls, PASSES, dump=dump, progress=progress, before=look)
    done = done.noted("placement", *notes)
    found = Plan(model, done, seen[0], tuple(made), training)
    if dump is not None:
        from penstock.inspection.dump.program import dump_program

        with dump.step("parts"):
            dump_program(dump, done, lambda: found.predicted.forecast)
    return found


def before_partition(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    *,
    schedule: str = "1f1b",
    precision: str | None = None,
    cuda_libraries: str = "torch",
    progress: ProgressHook | None = None,
) -> Module:
    """The whole model as `partition` sees it in `plan`: with its loss, gradients and updates."""
    from penstock.passes.manager import run_passes
    from penstock.passes.pipelines import PASSES

    microbatches = training.microbatches if training is not None else 1
    module, calls = _pipeline(model, cluster, training, {}, schedule, microbatches, precision, "none", cuda_libraries)
    return run_passes(module, calls[: [call.name for call in calls].index("partition")], PASSES, progress=progress)


def _pipeline(
    model: Model,
    cluster: Cluster,
    training: Training | None,
    cuts: dict[str, Attr],
    schedule: str,
    microbatches: int,
    precision: str | None,
    recompute: str,
    cuda_libraries: str,
    wire: str = "f32",
) -> tuple[Module, list[Call]]:
    """What passes start from, and which ones run. `cuts` are options for `partition`."""
    from penstock.frontends.moving import at_rest
    from penstock.frontends.training import attach_loss
    from penstock.passes.pipelines import inference_pipeline, training_pipeline

    library = cuda_libraries if any(d.kind == "cuda" for d in cluster.devices) else ""
    module, shares = model.module.but(cluster=cluster), cuts.get("shares", ())
    assert isinstance(shares, tuple)
    if training is None:
        module = at_rest(module, pure=model.imported.structure is not None)
        return module, inference_pipeline(cuts, microbatches, precision or "f32", library, shares, wire)
    compute, guard = precision or training.precision, training.guard_options()
    module = attach_loss(module, training, model.imported.names)
    rest = (compute, library, guard, recompute, shares, wire)
    return module, training_pipeline(training.pass_options(), cuts, schedule, microbatches, *rest)


def _in_groups(cluster: Cluster, stages: int, replicas: int) -> tuple[tuple[str, ...], ...]:
    """The devices of every stage, in the order of the cluster; none are named where each stage has one."""
    if replicas == 1:
        return ()
    names = [device.name for device in cluster.devices]
    count = stages or len(names) // replicas
    if replicas < 1 or count < 1 or count * replicas > len(names):
        what = f"{counted(max(count, 1), 'stage')} of {replicas} devices each need {max(count, 1) * replicas}, the cluster has {len(names)}"
        raise UsageError(what, hint="add devices, or ask for fewer stages or replicas")
    return tuple(tuple(names[s * replicas : (s + 1) * replicas]) for s in range(count))


def compile(
    plan: Plan,
    out: str | Path,
    *,
    backend: str = "tvm",
    target: str = "host",
    jobs: int | None = None,
    dump: Dump | None = None,
    progress: ProgressHook | None = None,
) -> Path:
    """Make machine code for every stage, and write the bundle. `jobs` is the most processes to compile with: one per core
    if not given; `dump` is shown the code."""
    from penstock.backends.bundle.writer import Provenance, write_bundle
    from penstock.backends.interface import CompileOptions
    from penstock.backends.registry import backend_of
    from penstock.inspection.exports.weights import keep_source

    maker = backend_of(backend)
    stages = [stage.index for stage in plan.module.stages]
    options = CompileOptions(target, jobs, progress, dump)
    facts = plan.as_dict()
    if dump is not None:
        dump.write("plan.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        names = maker.compile_stages(plan.module, stages, Path(scratch), options)
        files = {stage: [Path(scratch) / name for name in names[stage]] for stage in stages}
        with options.step("bundle") as said:
            bundle = write_bundle(
                out,
                plan.module,
                files,
                plan.model.imported.weights,
                backend=backend,
                plan=facts,
                provenance=Provenance(
                    plan.model.imported.source_hash,
                    plan.reference,
                    keep_source(plan.model.imported, plan.module, Path(scratch)),
                ),
            )
            said.append(str(bundle.path))
    if dump is not None:
        with dump.step("report"):
            dump.report(plan.module, facts, plan.predicted)
    return bundle.path
