"""The table of passes and the pipelines, as literal lists: each entry says why it stands where it stands."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.graph import Attr, Scalar
from ..ir.text import print_literal
from .autodiff import AutodiffOptions, autodiff
from .communicate import CommunicateOptions, communicate
from .decompose import DecomposeOptions, decompose
from .fuse import FuseOptions, fuse
from .guard import GuardOptions, guard
from .libraries import LibrariesOptions, libraries
from .lifetimes import LifetimesOptions, lifetimes
from .manager import Call, Pass, parse_pipeline
from .optimizers import OptimizerOptions, optimizer
from .partition import PartitionOptions, partition
from .precision import PrecisionOptions, check_precision, precision
from .recompute import RecomputeOptions, recompute
from .schedules import SCHEDULES, ScheduleOptions, schedule
from .simplify import SimplifyOptions, simplify
from .split import SplitOptions, split
from .split_backward import SplitBackwardOptions, split_backward
from .weight_versions import WeightVersionsOptions, weight_versions
from .wire import WireOptions, check_wire, wire

PASSES: dict[str, Pass] = {
    row.name: row
    for row in (
        Pass("simplify", simplify, SimplifyOptions),
        Pass("decompose", decompose, DecomposeOptions),
        Pass("precision", precision, PrecisionOptions),
        Pass("autodiff", autodiff, AutodiffOptions, gives=("differentiated",)),
        Pass("optimizer", optimizer, OptimizerOptions, needs=("differentiated",)),
        Pass("guard", guard, GuardOptions, needs=("differentiated",)),
        Pass("partition", partition, PartitionOptions),
        Pass("split", split, SplitOptions, gives=("staged",)),
        Pass("split-backward", split_backward, SplitBackwardOptions, needs=("staged",)),
        Pass("schedule", schedule, ScheduleOptions, needs=("staged",), gives=("scheduled",)),
        Pass("weight-versions", weight_versions, WeightVersionsOptions, needs=("scheduled",), gives=("versioned",)),
        Pass("wire", wire, WireOptions, needs=("staged",)),
        Pass("communicate", communicate, CommunicateOptions, needs=("scheduled",), gives=("wired",)),
        Pass("lifetimes", lifetimes, LifetimesOptions, needs=("wired",), gives=("freed",)),
        Pass("libraries", libraries, LibrariesOptions, needs=("staged",)),
        Pass("recompute", recompute, RecomputeOptions, needs=("wired",)),
        Pass("fuse", fuse, FuseOptions, needs=("staged",), gives=("fused",)),
    )
}

Entry = tuple[str, dict[str, Attr]]

# What a loss is scaled by at first where gradients are computed in f16; it adapts. The same as torch's.
LOSS_SCALE = 65536.0


def training_pipeline(
    optimizer: dict[str, Attr],
    partition: dict[str, Attr],
    schedule: str,
    microbatches: int,
    compute: str = "f32",
    library: str = "",
    guard: dict[str, Attr] | None = None,
    again: str = "auto",
    shares: tuple[Scalar, ...] = (),
    travels: str = "f32",
) -> list[Call]:
    """From a model with its loss to the program of every rank. `compute` is the element type of activations; `library`, where there are GPUs,
    who computes contractions on them; `guard` what is done about the gradient before it is used; `again` what is computed again in the
    backward pass: auto, none or all; `shares` how many microbatches each device of a stage runs; `travels` the
    element type of activations and gradients between stages. With f16 the loss is scaled, and guarded in any case."""
    check_precision(compute)
    check_wire(travels)
    if guard is None and compute == "f16":
        guard = {}
    scaled: dict[str, Attr] = {"loss_scale": LOSS_SCALE} if compute == "f16" else {}
    partition = {**partition, "microbatches": microbatches, "schedule": schedule, "recompute": again, **_travelling(travels)}
    return _calls(
        [
            ("simplify", {}),  # first, so that nothing dead or constant is differentiated
            *_decompose(library),  # composites without a gradient rule or kernel of their own, before gradients are taken
            *_precision(compute),  # before gradients are taken, so that they have the types of what they are gradients of
            (
                "autodiff",
                {"microbatches": microbatches, **scaled},
            ),  # on the whole model: gradients of values used by several stages are summed once
            ("optimizer", optimizer),  # after the gradients exist that it consumes
            *([("guard", guard)] if guard is not None else []),  # sees every use of a gradient and every new value of a parameter
            ("simplify", {}),  # gradients bring new constants and common subexpressions; merge them before costs are counted
            ("partition", partition),  # sees forward, backward and update, so that costs and memory are those of training
            ("split", {}),  # annotations become one graph per stage
            *_split_backward(schedule),  # what a stage sends is known now, and the schedule needs to know which stages have a W
            ("schedule", {"kind": schedule, "microbatches": microbatches, "shares": shares}),  # needs to know the stages only
            ("weight-versions", {}),  # needs to know which forwards run before which update
            *_wire(travels),  # before edges get their types; after gradients and W, so that no pass sees two forms of a value
            ("communicate", {}),  # after versions, so that the diff of that pass shows nothing but versions
            *_libraries(library),  # before kernels are chosen: what a library computes is a kernel of its own
            ("recompute", {"mode": again}),  # needs to know what is in flight, and who computes what, for memory and time
            ("fuse", {}),  # kernels are chosen in graphs that no longer change
            ("lifetimes", {}),  # last: sends and receives hold values, and what kernels are made of has no memory
        ]
    )


def inference_pipeline(
    partition: dict[str, Attr],
    microbatches: int,
    compute: str = "f32",
    library: str = "",
    shares: tuple[Scalar, ...] = (),
    travels: str = "f32",
) -> list[Call]:
    """From a model to the forward program of every rank."""
    check_precision(compute)
    check_wire(travels)
    partition = {**partition, "microbatches": microbatches, "schedule": "forward", **_travelling(travels)}
    return _calls(
        [
            ("simplify", {}),  # constants first
            *_decompose(library),  # composites without a kernel of their own
            *_precision(compute),  # when no composite is left that has no kernel
            ("partition", partition),  # forward cost only
            ("split", {}),  # annotations become one graph per stage
            ("schedule", {"kind": "forward", "microbatches": microbatches, "shares": shares}),  # forwards in order
            ("weight-versions", {}),  # one version; the verifier wants it said
            *_wire(travels),  # before edges get their types
            ("communicate", {}),  # activations between stages
            *_libraries(library),  # before kernels are chosen: what a library computes is a kernel of its own
            ("fuse", {}),  # kernels are chosen in graphs that no longer change
            ("lifetimes", {}),  # last: a microbatch is dropped once it is sent on, and what kernels are made of has no memory
        ]
    )


def _precision(compute: str) -> list[Entry]:
    return [("precision", {"compute": compute})] if compute != "f32" else []


def _travelling(travels: str) -> dict[str, Attr]:
    return {"wire": travels} if travels != "f32" else {}


def _wire(travels: str) -> list[Entry]:
    return [("wire", {"dtype": travels})] if travels != "f32" else []


def _decompose(library: str) -> list[Entry]:
    return [("decompose", {"keep": ()} if library == "none" else {})]


def _split_backward(kind: str) -> list[Entry]:
    return [("split-backward", {})] if kind in SCHEDULES and SCHEDULES[kind].splits else []


def _libraries(use: str) -> list[Entry]:
    return [("libraries", {"use": use})] if use else []


def _calls(entries: list[Entry]) -> list[Call]:
    return parse_pipeline(",".join(_texts(entries)), PASSES)


def _texts(entries: list[Entry]) -> Iterator[str]:
    for name, options in entries:
        yield f"{name}{{{','.join(f'{k}={print_literal(v)}' for k, v in options.items())}}}"
