"""Follow the placement hints of a model where they can be followed, and say so, or say why not.

In: hints, settings of the plan, and the module as a pass is about to see it. Out: a mesh and layouts for `shard`,
options for `partition`, and notes.

    layouts           followed when the devices suffice, and axes of a mesh give every tensor its holders. Without
                      `mesh` in the settings they bring their own; a mesh that they do not fit is an error
    pipeline stages   followed when there are as many as stages are asked for, and each is one contiguous stretch of
                      operations, in their order: stages start where the model says
    layers            followed when there are enough places between layers: stages start at such places, and the search
                      chooses among them

Pipeline stages go before layers, and of several configurations the first that fits is taken: for stages that whose
layouts are followed, if there are any. An operation without a
hint goes with the one before it. Hints are for nodes in the order of the file; a model whose nodes are in an order that
mixes stages is not reordered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from itertools import pairwise
from math import prod

from penstock.frontends.hints import DeviceConfiguration, Hints, TensorHint
from penstock.ir.attrs import Attr
from penstock.ir.graph import BUFFER, PARAM, REPLICAS, Module, Op
from penstock.ir.sharding.device_lists import fitting_sizes, splits_on
from penstock.ir.sharding.splits import Split
from penstock.passes.partition.chain import chain_of, names_to_split_at
from penstock.passes.sharding.given import parse_mesh
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised

from .options import PlanOptions

Changes = dict[str, Attr]
# Axes of a mesh that a model's own layouts bring: the last is tp.
_AXES = ("tp", *"abcdefghijklmno")


@dataclass(frozen=True)
class FollowedLayouts:
    """The mesh of a configuration that is followed, and the layout of each tensor as a text of `--shard`; empty where
    none is."""

    configuration: str = ""
    mesh: str = ""
    layouts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def of(self, module: Module) -> tuple[tuple[str, ...], list[str]]:
        """Return the layouts of tensors that a module has, and a note on all others."""
        graph = module.graphs.get("F") or module.graphs["main"]
        names = {name for name, var in module.vars.items() if var.role in (PARAM, BUFFER)}
        names |= {v.name for v in module.data_inputs} | {v.name for op in graph.ops for v in op.outs}
        lost = [name for name in self.layouts if name not in names]
        note = (
            f"layouts of configuration {self.configuration!r} of the model that are of no tensor of the program are "
            f"not followed: {', '.join(lost)}"
        )
        return tuple(text for name, text in self.layouts.items() if name in names), [note] * bool(lost)


class _DoesNotFit(Exception):
    """Facts about a configuration that speak against following it."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def follow_configurations(hints: Hints, options: PlanOptions, devices: int) -> FollowedLayouts:
    """Return the layouts of the first configuration of a model that the settings and the cluster's devices fit."""
    problems: list[str] = []
    if not options.hints or options.shard or not hints.configurations:
        return FollowedLayouts()
    for name, configuration in hints.configurations.items():
        try:
            stages = _stages_of(name, configuration, hints)
            mesh, layouts, left = _layouts_of(name, configuration, stages, options, devices)
        except _DoesNotFit as misfit:
            problems.append(f"the layouts of configuration {name!r} of the model are not followed: {misfit}")
        else:
            # The program shows what is followed: it is that of the same layouts from any other source.
            return FollowedLayouts(name, mesh, layouts, (*problems, *left))
    if options.mesh:
        raise UsageError(
            f"the mesh {options.mesh} and the layouts of the model do not fit:" + itemised(problems),
            hint="give another mesh, other layouts by --shard, or --hints ignore",
        )
    return FollowedLayouts(notes=tuple(problems))


def _stages_of(name: str, configuration: DeviceConfiguration, hints: Hints) -> int:
    """Return the number of stages of a configuration. Where its name is a mesh, a stage has the devices of that; else
    nodes say it."""
    size = prod(_mesh_called(name).values())
    if size > 1 and configuration.devices % size == 0:
        return configuration.devices // size
    return max(1, len({*hints.pipelines.get(name, {}).values()}))


def _mesh_called(name: str) -> dict[str, int]:
    """Return the axes of the mesh that a configuration is called like; none where it has another name."""
    try:
        return parse_mesh(name)
    except UsageError:
        return {}


def _layouts_of(
    name: str, configuration: DeviceConfiguration, stages: int, options: PlanOptions, devices: int
) -> tuple[str, dict[str, str], list[str]]:
    """Return the mesh of a configuration, the layouts of its tensors on it, and notes."""
    size, odd = divmod(configuration.devices, stages)
    if odd:
        raise _DoesNotFit(f"{configuration.devices} devices are no {stages} equal stages")
    _check_devices(size, options, devices)
    problems = list(configuration.problems)
    tensors = list(_within_stages(configuration.tensors))
    problems += [
        f"{_told(hint)}, and a stage has {counted(size, 'device')}"
        for hint, numbered in zip(configuration.tensors, tensors, strict=True)
        if numbered.layout.devices != tuple(range(size))
    ]
    if problems:
        raise _DoesNotFit(*problems)
    axes = _axes_of(name, tensors, size, options)
    chosen: dict[str, tuple[Split, ...]] = {}
    with_maker, left = {hint.name for hint in tensors if hint.made}, list[str]()
    # The node that makes a tensor says how it lies, before those that read it.
    for said, hint in sorted(zip(configuration.tensors, tensors, strict=True), key=lambda pair: not pair[1].made):
        splits = splits_on(hint.layout, list(axes.items()), len(hint.shape))
        if splits is None:
            problems.append(f"{_told(said)}, which are not along axes of {_mesh_text(axes)}")
        elif any(REPLICAS in split.axes for split in splits):
            problems.append(f"{_told(said)}, along {REPLICAS}, where microbatches are dealt out")
        elif chosen.setdefault(hint.name, splits) != splits:
            is_reader = hint.name in with_maker and not hint.made
            (left if is_reader else problems).append(f"{_told(said)}, and otherwise elsewhere")
    if problems:
        raise _DoesNotFit(*problems)
    in_order = {hint.name: chosen[hint.name] for hint in tensors if chosen[hint.name]}
    texts = {tensor: f"{escape(tensor)}=[{','.join(map(_dimension, splits))}]" for tensor, splits in in_order.items()}
    notes = [f"how a node reads a tensor is left to the compiler: {what}" for what in left]
    return options.mesh or _mesh_text(axes), texts, notes


def _check_devices(size: int, options: PlanOptions, devices: int) -> None:
    """Raise an error if stages of so many devices do not fit the settings."""
    have = prod(parse_mesh(options.mesh).values()) if options.mesh else devices
    alone = prod(n for axis, n in parse_mesh(options.mesh).items() if axis != REPLICAS) if options.mesh else size
    what = f"it is for {counted(size, 'device')} of a stage"
    if options.mesh and size not in (have, alone):
        raise _DoesNotFit(f"{what}, the mesh {options.mesh} has {have}")
    if not options.mesh and options.replicas != 1:
        raise _DoesNotFit(f"{what}, {options.replicas} replicas are asked for")
    if not options.mesh and any(len(names) != size for names in options.devices):
        raise _DoesNotFit(f"{what}, stages of {', '.join(str(len(names)) for names in options.devices)} are asked for")
    if not options.mesh and devices < size * max(options.stages, 1):
        raise _DoesNotFit(f"{what}, the cluster has {devices}" + f" for {options.stages} stages" * (options.stages > 1))


def _within_stages(hints: Sequence[TensorHint]) -> Iterator[TensorHint]:
    """Yield the hints with devices numbered within their stage."""
    devices: dict[int | None, set[int]] = {}
    for hint in hints:
        devices.setdefault(hint.stage, set()).update(hint.layout.devices)
    numbers = {stage: {device: i for i, device in enumerate(sorted(used))} for stage, used in devices.items()}
    for hint in hints:
        yield replace(hint, layout=hint.layout.renumbered(numbers[hint.stage]))


def _axes_of(name: str, hints: Sequence[TensorHint], size: int, options: PlanOptions) -> dict[str, int]:
    """Return the axes of the mesh of a configuration: those asked for, those that its name says, or the fewest."""
    if options.mesh:
        axes = parse_mesh(options.mesh)
        shared = {axis: n for axis, n in axes.items() if axis != REPLICAS}
        return axes if prod(axes.values()) == size else shared
    axes = _mesh_called(name)
    if axes and prod(axes.values()) == size:
        return axes
    if not any(hint.layout.shards for hint in hints):
        raise _DoesNotFit("it splits no tensor")
    sizes = fitting_sizes([hint.layout for hint in hints], size)
    if sizes is None:
        odd = [hint for hint in hints if fitting_sizes([hint.layout], size) is None] or hints
        raise _DoesNotFit(
            f"no mesh of {size} devices has axes for all of {', '.join(dict.fromkeys(h.name for h in odd))}"
        )
    return dict(zip((*_AXES[1 : len(sizes)], _AXES[0]), sizes, strict=True))


def _told(hint: TensorHint) -> str:
    shards = " x ".join(f"{each.parts} shards of dimension {each.dim}" for each in hint.layout.shards) or "whole"
    holders = ", ".join("+".join(map(str, group)) for group in hint.layout.holders)
    return f"{hint.name} at {hint.loc} is {'in ' * bool(hint.layout.shards)}{shards} on devices {holders}"


def _mesh_text(axes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _dimension(split: Split) -> str:
    if not split.axes:
        return "_"
    return (f"{split.blocks}*" if split.blocks > 1 else "") + "".join(f"/{axis}" for axis in split.axes)


def follow_hints(hints: Hints, module: Module, stages: int) -> tuple[Changes, list[str]]:
    """Return options for `partition` that follow the hints, empty if none can be followed; and notes for the user."""
    notes: list[str] = []
    chain = chain_of(module)
    for name, stage_of in hints.pipelines.items():
        starts, problem = _pipeline_starts(chain, stage_of, stages)
        if not problem:
            return {"split_at": _names(chain, starts)}, [
                *notes,
                f"stages are those of configuration {name!r} of the model",
            ]
        notes.append(f"the pipeline stages of configuration {name!r} of the model are not followed: {problem}")
    if hints.layers:
        starts = _changes(chain, hints.layers)
        if len(starts) >= stages - 1:
            return {"only_at": _names(chain, starts)}, [
                *notes,
                f"stages start between layers of the model, at one of {len(starts)} places",
            ]
        notes.append(
            f"the layers of the model are not followed: {stages} stages need {stages - 1} places between them, there "
            f"are {len(starts)}"
        )
    return {}, notes


def _pipeline_starts(chain: Sequence[Op], stage_of: Mapping[str, int], stages: int) -> tuple[list[int], str]:
    """Return the first operation of every stage but the first, and why the stages cannot be followed, if so."""
    hinted = [op for op in chain if op.loc in stage_of]
    count = len({stage_of[op.loc] for op in hinted})
    if count != stages:
        return [], f"it has {count} stages, {stages} are asked for"
    for before, after in pairwise(hinted):
        if stage_of[after.loc] < stage_of[before.loc]:
            order = (
                f"{before.loc} of stage {stage_of[before.loc]} stands before {after.loc} of stage {stage_of[after.loc]}"
            )
            return [], f"its stages are not contiguous in the order of the model, {order}"
    return _changes(chain, stage_of), ""


def _changes(chain: Sequence[Op], hint_of: Mapping[str, int] | Mapping[str, str]) -> list[int]:
    """Return the places in the chain whose hint is another one than before."""
    hinted = [(i, hint_of[op.loc]) for i, op in enumerate(chain) if op.loc in hint_of]
    return [i for (_, before), (i, after) in pairwise(hinted) if after != before]


def stage_starts(reference: Module, planned: Module) -> list[str | None]:
    """Name the operation that each stage of a planned module begins with, as `partition` takes it for `split_at`; None
    for the first. `reference` is the model before it was cut."""
    chain = chain_of(reference)
    starts: list[str | None] = [None]
    for stage in planned.stages[1:]:
        graph = planned.stage_graph(stage.index, "F")
        if graph is None:  # of a stage that updates weights of others
            continue
        results = {v.name for op in graph.ops for v in op.outs}
        starts.append(
            _names(chain, [next(i for i, op in enumerate(chain) if any(v.name in results for v in op.outs))])[0]
        )
    return starts


def _names(chain: Sequence[Op], starts: Sequence[int]) -> tuple[str, ...]:
    """Name these operations as `partition` understands them: by the nodes that begin with them, or else by their
    results."""
    names = names_to_split_at(chain)
    return tuple(names[i] for i in starts)
