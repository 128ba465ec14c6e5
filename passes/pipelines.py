"""The table of passes and the pipelines, as literal lists: each entry says why it stands where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec

from penstock.ir.attrs import Attr, Scalar, print_literal
from penstock.ir.schedule_names import INFERENCE
from penstock.passes.communicate.communicate import CommunicateOptions, communicate
from penstock.passes.communicate.overlap import OverlapOptions
from penstock.passes.communicate.wire import WireOptions, check_wire, wire
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.passes.kernels.libraries import LibrariesOptions, libraries
from penstock.passes.lengths.bound import BoundOptions, bound
from penstock.passes.memory.lifetimes import LifetimesOptions, lifetimes
from penstock.passes.memory.offload import STATE, OffloadOptions, offload
from penstock.passes.memory.overlap_that_fits import overlap_that_fits
from penstock.passes.memory.recompute import RecomputeOptions, recompute
from penstock.passes.memory.weight_copies import WeightCopiesOptions, weight_copies
from penstock.passes.partition.partition import PartitionOptions, partition
from penstock.passes.partition.split import SplitOptions, split
from penstock.passes.partition.split_backward import SplitBackwardOptions, split_backward
from penstock.passes.rewrite.decompose import DecomposeOptions, decompose
from penstock.passes.rewrite.merge_convolutions import MergeConvolutionsOptions, merge_convolutions
from penstock.passes.rewrite.precision import PrecisionOptions, check_precision, precision
from penstock.passes.rewrite.quantise import QuantiseOptions, quantise
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify
from penstock.passes.schedules.schedule import PACK_SCHEDULES, ScheduleOptions, schedule, splits_backward
from penstock.passes.schedules.weight_versions import WeightVersionsOptions, weight_versions
from penstock.passes.sharding.localize import LocalizeOptions, localize
from penstock.passes.sharding.replicas.zero import ZeroOptions, zero
from penstock.passes.sharding.shard import ShardOptions, shard
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.passes.training.guard import GuardOptions, guard
from penstock.passes.training.optimizer import OptimizerOptions, optimizer
from penstock.passes.training.update_on import UpdateOnOptions, update_on

from .manager import Call, Pass, parse_pipeline

PASSES: dict[str, Pass] = {
    row.name: row
    for row in (
        Pass("simplify", simplify, SimplifyOptions),
        Pass("merge-convolutions", merge_convolutions, MergeConvolutionsOptions),
        Pass("decompose", decompose, DecomposeOptions),
        Pass("quantise", quantise, QuantiseOptions),
        Pass("precision", precision, PrecisionOptions),
        Pass("bound", bound, BoundOptions),
        Pass("autodiff", autodiff, AutodiffOptions, gives=("differentiated",)),
        Pass("optimizer", optimizer, OptimizerOptions, needs=("differentiated",)),
        Pass("guard", guard, GuardOptions, needs=("differentiated",)),
        Pass("shard", shard, ShardOptions, gives=("sharded",)),
        Pass("partition", partition, PartitionOptions),
        Pass("split", split, SplitOptions, gives=("staged",)),
        Pass("split-backward", split_backward, SplitBackwardOptions, needs=("staged",)),
        Pass("update-on", update_on, UpdateOnOptions, needs=("staged", "differentiated")),
        Pass("schedule", schedule, ScheduleOptions, needs=("staged",), gives=("scheduled",)),
        Pass("weight-versions", weight_versions, WeightVersionsOptions, needs=("scheduled",), gives=("versioned",)),
        Pass("localize", localize, LocalizeOptions, needs=("staged", "sharded")),
        Pass("zero", zero, ZeroOptions, needs=("versioned",)),
        Pass("wire", wire, WireOptions, needs=("staged",)),
        Pass("communicate", communicate, CommunicateOptions, needs=("scheduled",), gives=("wired",)),
        Pass("lifetimes", lifetimes, LifetimesOptions, needs=("wired",), gives=("freed",)),
        Pass("offload", offload, OffloadOptions, needs=("wired",)),
        Pass("libraries", libraries, LibrariesOptions, needs=("staged",)),
        Pass("recompute", recompute, RecomputeOptions, needs=("wired",)),
        Pass("weight-copies", weight_copies, WeightCopiesOptions, needs=("versioned", "wired")),
        Pass("overlap", overlap_that_fits, OverlapOptions, needs=("staged",)),
        Pass("fuse", fuse, FuseOptions, needs=("staged",), gives=("fused",)),
    )
}


P = ParamSpec("P")


class PipelineEntry(NamedTuple):
    """A pass in a pipeline, and why it stands there. Passes that are not `wanted` are left out. `condition` says when
    they are wanted."""

    name: str
    options: dict[str, Attr]
    why: str
    wanted: bool = True
    condition: str = ""


# The first loss scale where gradients are computed in f16; it adapts. The same as torch's.
LOSS_SCALE = 65536.0


@dataclass(frozen=True)
class PipelineOptions:
    """Settings of a pipeline. `precision` is the element type of activations, `wire` that of activations and gradients
    between stages; `recompute` is what is computed again in the backward pass: auto, none or all; `shares` are how many
    microbatches each device of a stage runs; `library`, where there are GPUs, is who computes contractions on them;
    `guard` what is done about the gradient before it is used; `mesh` the axes of every stage's devices, `layouts` how
    tensors lie on them; `weights` the bits of weights in inference; `zero` the level at which replicas share
    variables out; `packs` the number of stages on a device; `offload` what has its home in another memory space,
    `space`; `update_on` the devices that run updates alone."""

    schedule: str = "1f1b"
    microbatches: int = 1
    precision: str = "f32"
    recompute: str = "auto"
    wire: str = "f32"
    shares: tuple[Scalar, ...] = ()
    library: str = ""
    guard: dict[str, Attr] | None = None
    mesh: str = ""
    layouts: tuple[str, ...] = ()
    weights: int = 32
    zero: int = 0
    packs: int = 1
    offload: str = "none"
    space: str = ""
    update_on: tuple[str, ...] = ()


DEFAULTS = PipelineOptions()


def training_entries(
    optimizer: dict[str, Attr], partition: dict[str, Attr], options: PipelineOptions = DEFAULTS
) -> list[PipelineEntry]:
    """Return the passes from a model with its loss to the program of every rank. With f16 the loss is scaled, and
    guarded in any case."""
    check_precision(options.precision)
    check_wire(options.wire)
    return [*_gradients(optimizer, options), *_cutting(partition, options), *_running(options)]


def _gradients(optimizer: dict[str, Attr], options: PipelineOptions) -> list[PipelineEntry]:
    """Return the passes on the whole model, for its gradients and its update."""
    microbatches, guard = options.microbatches, options.guard
    if guard is None and options.precision == "f16":
        guard = {}
    scaled: dict[str, Attr] = {"loss_scale": LOSS_SCALE} if options.precision == "f16" else {}
    return [
        PipelineEntry("simplify", {}, "first, so that nothing dead or constant is differentiated"),
        _decompose(
            options.library, "composites without a gradient rule or kernel of their own, before gradients are taken"
        ),
        _precision(
            options.precision, "before gradients are taken, so that they have the types of what they are gradients of"
        ),
        PipelineEntry(
            "autodiff",
            {"microbatches": microbatches, **scaled},
            "on the whole model: gradients of values used by several stages are summed once",
        ),
        PipelineEntry("optimizer", optimizer, "after the gradients exist that it consumes"),
        PipelineEntry(
            "guard",
            guard or {},
            "sees every use of a gradient and every new value of a parameter",
            guard is not None,
            "--clip, --skip-nonfinite, --precision f16",
        ),
        PipelineEntry(
            "simplify",
            {},
            "gradients bring new constants and common subexpressions; merge them before costs are counted",
        ),
    ]


def _cutting(partition: dict[str, Attr], options: PipelineOptions) -> list[PipelineEntry]:
    """Return the passes that choose stages and their schedule."""
    schedule, microbatches = options.schedule, options.microbatches
    same: dict[str, Attr] = {
        "microbatches": microbatches,
        "schedule": schedule,
        "recompute": options.recompute,
        "wire": options.wire,
        **({"updates_elsewhere": True} if options.update_on else {}),
    }
    # Stages with unlike numbers of replicas have no mesh in common.
    partition = {**_meshed(options), **partition, **same, **_packed(options)}
    return [
        _shard(options),
        PipelineEntry(
            "partition", partition, "sees forward, backward and update, so that costs and memory are those of training"
        ),
        PipelineEntry("split", {}, "annotations become one graph per stage"),
        PipelineEntry(
            "split-backward",
            {},
            "what a stage sends is known now, and the schedule needs to know which stages have a W",
            splits_backward(schedule),
            "--schedule zb-1f1b",
        ),
        PipelineEntry(
            "update-on",
            {"devices": options.update_on or ("cpu:1",)},
            "on stage graphs, whose gradients and new weights are messages from here on; before the schedule",
            bool(options.update_on),
            "--update-on",
        ),
        PipelineEntry(
            "schedule",
            {"kind": schedule, "microbatches": microbatches, "shares": options.shares},
            "needs to know the stages only",
        ),
        PipelineEntry("weight-versions", {}, "needs to know which forwards run before which update"),
        _localize(options),
        PipelineEntry(
            "zero",
            {"level": options.zero or 1},
            "on what one device does: collectives over replicas follow from the types of variables",
            bool(options.zero),
            "--zero",
        ),
    ]


def _packed(options: PipelineOptions) -> dict[str, Attr]:
    """Return the options of `partition` for several stages on a device; none where each has one."""
    if options.packs == 1:
        return {}
    folded = options.schedule in PACK_SCHEDULES and PACK_SCHEDULES[options.schedule].folded
    return {"packs": options.packs, "folded": folded}


def _running(options: PipelineOptions) -> list[PipelineEntry]:
    """Return the passes for messages, kernels and memory of the stages."""
    return [
        _wire(
            options.wire,
            "before edges get their types; after gradients and W, so that no pass sees two forms of a value",
        ),
        PipelineEntry("communicate", {}, "after versions, so that the diff of that pass shows nothing but versions"),
        _libraries(options.library),
        PipelineEntry(
            "offload",
            {**({"space": options.space} if options.space else {}), **_moved(options.offload)},
            "before recompute, which need not make room for what is elsewhere; messages stand where they stay",
            options.offload != "none",
            "--offload",
        ),
        PipelineEntry(
            "recompute",
            {"mode": options.recompute},
            "needs to know what is in flight, and who computes what, for memory and time",
        ),
        PipelineEntry(
            "weight-copies",
            {},
            "takes memory that nothing else needs; before kernels, which then read 16 bits",
            options.precision != "f32" and bool(options.library),
            "--precision and devices that are GPUs",
        ),
        _overlap(options),
        PipelineEntry("fuse", {}, "kernels are chosen in graphs that no longer change"),
        PipelineEntry(
            "lifetimes", {}, "last: sends and receives hold values, and what kernels are made of has no memory"
        ),
    ]


def _moved(offload: str) -> dict[str, Attr]:
    """Return the option of `offload` for what is elsewhere, where it is not state."""
    return {} if offload in ("none", STATE) else {"what": offload}


def inference_entries(partition: dict[str, Attr], options: PipelineOptions = DEFAULTS) -> list[PipelineEntry]:
    """Return the passes from a model to the forward program of every rank."""
    check_precision(options.precision)
    check_wire(options.wire)
    microbatches = options.microbatches
    same: dict[str, Attr] = {"microbatches": microbatches, "schedule": INFERENCE, "wire": options.wire}
    partition = {**partition, **same, **_meshed(options)}
    return [
        PipelineEntry("simplify", {}, "constants first"),
        PipelineEntry(
            "merge-convolutions",
            {},
            "while a norm is one operation; weights that lie in parts on a mesh stay as they are",
            not options.mesh,
        ),
        _decompose(options.library, "composites without a kernel of their own"),
        PipelineEntry(
            "quantise",
            {"bits": options.weights if options.weights < 32 else 8},
            "before the cut, so that costs are those of the bytes that are read; before products are rounded",
            options.weights < 32,
            "--weights",
        ),
        _precision(options.precision, "when no composite is left that has no kernel"),
        PipelineEntry(
            "bound",
            {"name": "seq", "size": 64, "inputs": ("%ids[1]",), "outputs": ("%y[1]",)},
            "on the whole model, when attention is one operation; masks are operations like others from there on",
            False,
            "--dim 'seq<=512', for each size that code is made for",
        ),
        _shard(options),
        PipelineEntry("partition", partition, "forward cost only"),
        PipelineEntry("split", {}, "annotations become one graph per stage"),
        PipelineEntry(
            "schedule", {"kind": INFERENCE, "microbatches": microbatches, "shares": options.shares}, "forwards in order"
        ),
        PipelineEntry("weight-versions", {}, "one version; the verifier wants it said"),
        _localize(options),
        _wire(options.wire, "before edges get their types"),
        PipelineEntry("communicate", {}, "activations between stages"),
        _libraries(options.library),
        _overlap(options),
        PipelineEntry("fuse", {}, "kernels are chosen in graphs that no longer change"),
        PipelineEntry(
            "lifetimes",
            {},
            "last: a microbatch is dropped once it is sent on, and what kernels are made of has no memory",
        ),
    ]


def _meshed(options: PipelineOptions) -> dict[str, Attr]:
    return {"mesh": options.mesh} if options.mesh else {}


def _shard(options: PipelineOptions) -> PipelineEntry:
    why = "on the whole program, so that gradients and updates follow the same rules as the model; names axes only"
    settings: dict[str, Attr] = {"mesh": options.mesh, "given": options.layouts}
    return PipelineEntry("shard", settings if options.mesh else {}, why, bool(options.mesh), "--mesh")


def _localize(options: PipelineOptions) -> PipelineEntry:
    why = "when graphs have their meshes, and before messages, memory and kernels, which are those of one device"
    return PipelineEntry("localize", {}, why, bool(options.mesh), "--mesh")


def _overlap(options: PipelineOptions) -> PipelineEntry:
    why = "when graphs have all their operations; before kernels are chosen, which run in the order of operations"
    return PipelineEntry("overlap", {}, why, bool(options.mesh) or options.zero > 1, "--mesh or --zero 2")


def _precision(precision: str, why: str) -> PipelineEntry:
    wanted = precision != "f32"
    return PipelineEntry("precision", {"compute": precision if wanted else "bf16"}, why, wanted, "--precision")


def _wire(wire: str, why: str) -> PipelineEntry:
    wanted = wire != "f32"
    return PipelineEntry("wire", {"dtype": wire if wanted else "bf16"}, why, wanted, "--wire")


def _decompose(library: str, why: str) -> PipelineEntry:
    return PipelineEntry("decompose", {"keep": ()} if library == "none" else {}, why)


def _libraries(use: str) -> PipelineEntry:
    why = "before kernels are chosen: what a library computes is a kernel of its own"
    return PipelineEntry("libraries", {"use": use} if use else {}, why, bool(use), "devices that are GPUs")


# The pipelines by name: their purpose, and their passes by default.
PIPELINES: dict[str, tuple[str, Callable[[], list[PipelineEntry]]]] = {
    "train": ("from a model with its loss to the program of every rank", lambda: training_entries({}, {})),
    "infer": ("from a model to the forward program of every rank", lambda: inference_entries({})),
}


def calls_of(entries: Iterable[PipelineEntry]) -> list[Call]:
    """Return the calls of the entries that are wanted."""
    return parse_pipeline(",".join(_text(entry) for entry in entries if entry.wanted), PASSES)


def _pipeline(entries: Callable[P, list[PipelineEntry]]) -> Callable[P, list[Call]]:
    """Return a function that gives the calls of the entries."""

    def pipeline(*arguments: P.args, **options: P.kwargs) -> list[Call]:
        return calls_of(entries(*arguments, **options))

    return pipeline


training_pipeline, inference_pipeline = _pipeline(training_entries), _pipeline(inference_entries)


def pipeline_text(name: str) -> str:
    """Return a pipeline as a file that `penstock opt --pipeline` reads. It has a pass per line with the reason for its
    place. Passes that run only on request are comments."""
    meaning, entries = PIPELINES[name]
    rows = []
    for entry in entries():
        (call,) = parse_pipeline(_text(entry), PASSES)
        condition = f"with {entry.condition}: " if entry.condition else ""
        rows.append((str(call) if entry.wanted else f"// {call}", f"// {condition}{entry.why}"))
    width = max(len(call) for call, _ in rows)
    return f"// {name}: {meaning}\n" + "".join(f"{call:<{width}}  {why}\n" for call, why in rows)


def _text(entry: PipelineEntry) -> str:
    return f"{entry.name}{{{','.join(f'{k}={print_literal(v)}' for k, v in entry.options.items())}}}"
