"""The verbs of Python users, from a model to a bundle. A facade: the work is done in penstock.planning.

from_onnx   file -> Model: the module and its weights
from_torch  torch module or exported program -> Model
plan        Model, cluster, training -> Plan: the module after all passes; look at it, print it, throw it away
plan_best   the same, where the planner chooses
compile     Plan -> bundle directory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule_names import ALL_SYNCHRONOUS
from penstock.passes.sharding.written import layouts_of
from penstock.planning import build, search
from penstock.planning import model as models
from penstock.planning.model import Load, Model, Size
from penstock.planning.objectives import choose
from penstock.planning.options import BuildOptions, PlanOptions, SearchOptions
from penstock.planning.plan import Plan
from penstock.planning.watching import Feedback, ProgressHook

if TYPE_CHECKING:
    # The announced signature of plan_best (tests/public_api.txt) names its types as api.Plan and api.ProgressHook.
    from penstock import api
    from penstock.inspection.dump import Dump


def from_onnx(
    path: str | Path,
    dims: Mapping[str, Size] | None = None,
    frozen: str | None = None,
    known: Mapping[str, object] | None = None,
    trained: str | None = None,
) -> Model:
    """Import an ONNX file. `dims` binds symbolic dimensions, `known` inputs to numbers or arrays (a shape, axes,
    repeats that the model takes as inputs). `frozen` is a pattern of parameter names that are not trained, `trained` of
    those that are although they hold a single number."""
    return models.from_onnx(path, dims, frozen, known, trained)


def from_torch(
    source: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Mapping[str, Size] | None = None,
    frozen: str | None = None,
) -> Model:
    """Import a program of torch: an nn.Module or torch.fx.GraphModule with example arguments, whose sizes count, or an
    ExportedProgram.

    `dims` binds symbolic dimensions of an ExportedProgram, by the symbol's name or as INPUT.AXIS. `frozen` is a pattern
    of parameter names that are not trained, like those that do not require a gradient. Weights are copied.
    """
    return models.from_torch(source, args, kwargs, dims=dims, frozen=frozen)


def plan(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    *,
    schedule: str = "1f1b",
    stages: int = 0,
    split_at: Sequence[str] = (),
    split_by: str = "operation",
    pin: Sequence[str] = (),
    microbatches: int = 1,
    replicas: int = 1,
    devices: Sequence[Sequence[str]] = (),
    shares: Sequence[Sequence[int]] = (),
    precision: str | None = None,
    weights: str = "f32",
    recompute: str = "auto",
    cuda_libraries: str = "torch",
    wire: str = "f32",
    objective: str = "",
    hints: bool = True,
    mesh: str = "",
    shard: str | Sequence[str] | Mapping[str, Any] = (),
    zero: int = 0,
    packs: int = 1,
    offload: str = "none",
    spill: str = "",
    update_on: str = "",
    dump: Dump | None = None,
    progress: ProgressHook | None = None,
) -> Plan:
    """Run all passes. Without `training` the plan is for inference. For settings see docs/cli.md.

    `shard` is text, or maps names to `(None, "tp")` or to styles of `parallelize_module` (docs/sharding.md)."""
    options = PlanOptions(
        schedule=schedule,
        stages=stages,
        split_at=split_at,
        split_by=split_by,
        pin=pin,
        microbatches=microbatches,
        replicas=replicas,
        devices=devices,
        shares=shares,
        precision=precision,
        weights=weights,
        recompute=recompute,
        cuda_libraries=cuda_libraries,
        wire=wire,
        objective=objective,
        hints=hints,
        mesh=mesh,
        shard=layouts_of(shard),
        zero=zero,
        packs=packs,
        offload=offload,
        spill=spill,
        update_on=update_on,
    )
    return choose.plan_for_objective(model, cluster, training, options, Feedback(dump, progress))


def plan_best(
    load: Load,
    cluster: Cluster,
    training: Training,
    *,
    batch: int,
    sizes: Sequence[int | None] = (None,),
    schedules: Sequence[str] = ALL_SYNCHRONOUS,
    recompute: str = "auto",
    replicas: int = 0,
    precision: str | None = None,
    zero: int = 0,
    explained: bool = True,
    progress: api.ProgressHook | None = None,
    **options: Any,
) -> api.Plan:
    """Find the best plan for batches of so many samples, as `--batch` does.

    `load` gives the model with so many samples per microbatch, for each of the `sizes` to choose from, or as it is for
    None. The fastest of `schedules` is taken, by default of those that compute what plain training does; those that
    move weights the least are tried where weights move, or nothing like them is asked for. `replicas` is
    the most devices of a stage, 0 for any number; `recompute` is auto, none or all, `zero` 0 or 1. Where nothing fits,
    the error says what would, if that shall be `explained`, which takes longer than finding out that nothing fits.
    Further options are `cuda_libraries`, `wire`, `offload`, `spill`, `update_on`, `mesh`, `shard` and `dump`, as of
    `penstock.plan`. With `shard="none"` no tensor is split; a `mesh` has the axes that tensors are split over.
    """
    feedback = Feedback(options.pop("dump", None), progress)
    options["shard"] = layouts_of(options.get("shard"))
    settings = SearchOptions(
        batch=batch,
        sizes=sizes,
        schedules=schedules,
        recompute=recompute,
        replicas=replicas,
        precision=precision,
        zero=zero,
        explained=explained,
        **options,
    )
    return search.search(load, cluster, training, settings, feedback)


def compile(
    plan: Plan,
    out: str | Path,
    *,
    backend: str = "tvm",
    target: str = "host",
    jobs: int | None = None,
    with_runtime: bool = False,
    dump: Dump | None = None,
    progress: ProgressHook | None = None,
) -> Path:
    """Compile machine code for every stage, and write the bundle. `jobs` is the most processes to compile with, by
    default one per core; `dump` receives the code. `with_runtime` puts TVM's runtime library into the bundle, for hosts
    where TVM is not installed."""
    return build.build(plan, out, BuildOptions(backend, target, jobs, with_runtime), Feedback(dump, progress))


__all__ = ["Load", "Model", "Plan", "ProgressHook", "compile", "from_onnx", "from_torch", "plan", "plan_best"]
