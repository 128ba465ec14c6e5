"""The passes over a model, from the imported module to the program of every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from penstock.frontends.running_statistics import at_rest
from penstock.frontends.training import Training, attach_loss
from penstock.ir.attrs import Attr
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import FILE, RAM, SPACE_KINDS, Space
from penstock.ir.graph import REPLICAS, Mesh, Module
from penstock.ir.sharding.batch_dims import with_batch_dims
from penstock.passes.manager import Call, run_passes
from penstock.passes.partition.modules import OPERATION
from penstock.passes.pipelines import PASSES, PipelineOptions, inference_pipeline, training_pipeline
from penstock.passes.schedules.dealing import fair_shares
from penstock.passes.schedules.schedule import check_several
from penstock.passes.sharding.given import parse_mesh, stage_meshes
from penstock.passes.sharding.shard import ShardOptions
from penstock.passes.sharding.written import AUTO, NONE, layouts_of
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised

from .hints import FollowedLayouts, follow_configurations, follow_hints
from .model import Model
from .options import WEIGHTS, PlanOptions
from .plan import Plan
from .watching import SILENT, Feedback
from .widths.choose import asks_for_widths, with_widths

_DEFAULTS = PlanOptions()
# The names of memory spaces that no cluster file names: files, and memory of the host for GPUs.
SPILL, HOST_MEMORY = "disk", "host-memory"


@dataclass(frozen=True)
class PreparedModel:
    """A model after the passes on the whole model, and further calls that stand before those for stages."""

    module: Module
    calls: tuple[Call, ...]

    def begin(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls that are left to do."""
        return [*self.calls, *calls[_head(calls) :]]


# The passes from which on a pipeline knows of devices.
_OF_DEVICES = ("shard", "partition")


def _head(calls: Sequence[Call]) -> int:
    return next(i for i, call in enumerate(calls) if call.name in _OF_DEVICES)


def prepare(model: Model, cluster: Cluster, options: PlanOptions, training: Training | None = None) -> Module:
    """Run the passes on the whole model that come before those for stages."""
    if training is not None:
        options = replace(options, microbatches=training.microbatches)
    module, calls = _pipeline(model, cluster, training, options, ())
    return run_passes(module, calls[: _head(calls)], PASSES)


def plan_model(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = _DEFAULTS,
    feedback: Feedback = SILENT,
    prepared: PreparedModel | None = None,
) -> Plan:
    """Run all passes, or those behind `prepared`. Without `training` the plan is for inference."""
    if training is not None:
        options = replace(options, microbatches=training.microbatches)
    layouts = follow_configurations(model.imported.hints, options, len(cluster.devices))
    if layouts.layouts:
        options = replace(options, mesh=layouts.mesh, shard=tuple(layouts.layouts.values()))
    options = _with_replicas(options, training is not None)
    check_updates_elsewhere(cluster, options, training is not None)
    options = replace(options, devices=_devices_of_stages(options) or _in_groups(cluster, options))
    _check_alike(cluster, options.devices)
    shares = _shares(cluster, options)
    module, calls = _pipeline(model, cluster, training, options, shares)
    steps = _Steps(model, options, cluster, layouts)
    if prepared is not None:
        steps.calls += calls[: _head(calls)]
        module, calls = prepared.module.but(cluster=module.cluster), prepared.begin(calls)
    watcher = feedback.watcher
    done = run_passes(module, calls, PASSES, dump=watcher, progress=feedback.progress, before=steps.look)
    done = done.noted("placement", *steps.notes)
    assert steps.reference is not None
    plan = Plan(model, done, steps.reference, tuple(steps.calls), training)
    if watcher is not None:
        with watcher.step("parts"):
            watcher.program(done, lambda: plan.predicted)
    return plan


def before_partition(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = _DEFAULTS,
    feedback: Feedback = SILENT,
) -> Module:
    """Return the whole model as `partition` sees it: with its loss, gradients and updates."""
    options = replace(options, microbatches=training.microbatches if training is not None else 1)
    module, calls = _pipeline(model, cluster, training, options, ())
    first = [call.name for call in calls].index("partition")
    return run_passes(module, calls[:first], PASSES, progress=feedback.progress)


class _Steps:
    """The calls of passes, recorded as they happen. Hints of the model change the calls of `shard` and of `partition`,
    before which the model is kept."""

    def __init__(self, model: Model, options: PlanOptions, cluster: Cluster, layouts: FollowedLayouts) -> None:
        stages = len(options.devices) or options.stages or len(cluster.devices)
        self._cluster, self._devices = cluster, options.devices
        hints = model.imported.hints
        if layouts.configuration in hints.pipelines:
            hints = replace(hints, pipelines={layouts.configuration: hints.pipelines[layouts.configuration]})
        self.notes: list[str] = [*layouts.notes]
        flags = _asked_starts(options)
        if hints and options.hints and flags and stages > 1:
            self.notes.append(
                f"the {hints.of_stages()} of the model are not followed: {' and '.join(flags)} "
                f"{'says' if len(flags) == 1 else 'say'} where stages start"
            )
        self._hints = hints if options.hints and not flags and stages > 1 else None
        self._layouts, self._stages = layouts, stages
        self.reference: Module | None = None
        self.calls: list[Call] = []

    def look(self, call: Call, before: Module) -> Call:
        """Return the call of a pass for this module."""
        if call.name == "shard" and self._layouts.layouts:
            layouts, notes = self._layouts.of(before)
            call = Call(call.name, replace(call.options, given=layouts))
            self.notes += notes
        if isinstance(call.options, ShardOptions) and asks_for_widths(call.options):
            sharding, note = with_widths(before, call.options, self._cluster, self._devices)
            call = Call(call.name, sharding)
            self.notes.append(note)
        if call.name == "partition":
            self.reference = before
            if self._hints:
                changes, notes = follow_hints(self._hints, before, self._stages)
                call = Call(call.name, replace(call.options, **changes))
                self.notes += notes
        self.calls.append(call)
        return call


def _asked_starts(options: PlanOptions) -> list[str]:
    """Return the settings that say where stages start, as flags."""
    flags = {"--split-at": options.split_at, "--split-by": options.split_by != OPERATION, "--pin": options.pin}
    return [flag for flag, is_set in flags.items() if is_set]


def _pipeline(
    model: Model, cluster: Cluster, training: Training | None, options: PlanOptions, shares: tuple[int, ...]
) -> tuple[Module, list[Call]]:
    """Return the module that passes start from, and their calls."""
    cuts: dict[str, Attr] = {
        "stages": options.stages,
        "split_at": tuple(options.split_at),
        **({"split_by": options.split_by} if options.split_by != OPERATION else {}),
        **({"pins": tuple(options.pin)} if options.pin else {}),
        "devices": tuple(" ".join(names) for names in options.devices),
        "shares": shares,
        **({"mesh": ""} if _are_unlike(options) else {}),
    }
    settings = PipelineOptions(
        schedule=options.schedule,
        microbatches=options.microbatches,
        precision=options.precision or "f32",
        recompute=options.recompute,
        wire=options.wire,
        shares=shares,
        library=options.cuda_libraries if any(d.kind == "cuda" for d in cluster.devices) else "",
        mesh=options.mesh,
        layouts=_layouts(options),
        weights=WEIGHTS[options.weights],
        packs=options.packs,
        offload=options.offload,
        space=_space_name(cluster, options.spill),
        zero=options.zero,
        update_on=updaters(options.update_on),
    )
    if training is not None and options.weights != "f32":
        raise UsageError(
            f"weights in {options.weights} cannot be trained", hint="compile for inference, without --loss"
        )
    module = model.module.but(cluster=_with_space(cluster, options))
    if training is None and options.packs > 1:
        raise UsageError("--packs puts several stages of a training on a device", hint="compile with --loss")
    if training is not None:
        check_several(options.schedule, options.packs)
    if training is None and options.offload != "none":
        raise UsageError("--offload moves what a training holds", hint="compile with --loss")
    if training is None:
        return at_rest(module, pure=model.imported.structure is not None), inference_pipeline(cuts, settings)
    settings = replace(settings, precision=options.precision or training.precision, guard=training.guard_options())
    module = with_batch_dims(attach_loss(module, training, model.imported.names), model.imported.symbols)
    return module, training_pipeline(training.pass_options(), cuts, settings)


def _layouts(options: PlanOptions) -> tuple[str, ...]:
    """Return the layouts that are given as texts."""
    layouts = tuple(text for text in layouts_of(options.shard) if text != NONE)
    if AUTO in layouts:
        raise UsageError(
            "--shard auto chooses among plans of one program, and this is one of several", hint="give layouts"
        )
    return layouts


def _space_name(cluster: Cluster, spill: str) -> str:
    """Name the space that `spill` stands for; nothing where that is the first of the cluster."""
    own_space = _own_space(cluster, spill)
    if own_space is None or not own_space.path:
        return spill
    known = _known(cluster, own_space)
    return own_space.name if known is None else known.name


def _with_space(cluster: Cluster, options: PlanOptions) -> Cluster:
    """Return the cluster with the memory space that `spill` names by its folder. Devices that reach no space get one
    behind those of the cluster: for temporary files, or for GPUs memory of their host."""
    if options.offload == "none":
        if options.spill:
            raise UsageError("--spill says where what --offload moves is", hint="add --offload state")
        return cluster
    own_space, result = _own_space(cluster, options.spill), cluster
    if own_space is None and options.spill not in {space.name for space in cluster.spaces}:
        # The pass refuses a name of no space.
        return cluster
    if own_space is not None and own_space.path and not _known(cluster, own_space):
        result = replace(result, spaces=(own_space, *result.spaces))
    for kind, name in ((FILE, SPILL), (RAM, HOST_MEMORY)):
        if any(SPACE_KINDS[kind] == d.kind and not result.spaces_of(d.name) for d in result.devices):
            result = replace(result, spaces=(*result.spaces, Space.from_fields(name, {"kind": kind})))
    return result


def space_of(spill: str) -> Space | None:
    """Return the memory space that `spill` makes: one in its folder, or for temporary files if it is empty; None where
    it names a space of the cluster."""
    return None if spill and "/" not in spill else Space(SPILL, path=spill)


def _own_space(cluster: Cluster, spill: str) -> Space | None:
    """Return the space that `spill` makes in a cluster, under a name that none of its spaces has."""
    own_space, names = space_of(spill), {space.name for space in cluster.spaces}
    others = (f"{SPILL}-{number}" for number in range(2, len(names) + 2))
    name = next(name for name in (SPILL, *others) if name not in names)
    return None if own_space is None else replace(own_space, name=name)


def _known(cluster: Cluster, own_space: Space) -> Space | None:
    """Return the space of a cluster in that folder."""
    return next((s for s in cluster.spaces if s.kind == FILE and (s.path, s.host) == (own_space.path, "")), None)


def _with_replicas(options: PlanOptions, trains: bool) -> PlanOptions:
    """Return options in which replicas that share variables out are an axis of a mesh."""
    if not options.zero:
        return options
    if not trains:
        raise UsageError("--zero shares out what training holds", hint="compile with --loss")
    named = max((len(names) for names in options.devices), default=1)
    replicas = parse_mesh(options.mesh).get(REPLICAS, 1) if options.mesh else max(options.replicas, named)
    if replicas < 2:
        raise UsageError("--zero shares variables out among replicas, and there are none", hint="take --replicas 2")
    return options if options.mesh else replace(options, mesh=f"{REPLICAS}={replicas}", replicas=1)


def with_devices(cluster: Cluster, names: Collection[str]) -> Cluster:
    """Return the cluster with these devices alone, in this order."""
    links = tuple(link for link in cluster.links if link.a in names and link.b in names)
    ways = tuple(way for way in cluster.ways if way.device in names)
    return replace(cluster, devices=tuple(cluster.device(name) for name in names), links=links, ways=ways)


def updaters(update_on: str) -> tuple[str, ...]:
    """Return the devices that run updates alone."""
    return tuple(name.strip() for name in update_on.split(",")) if update_on else ()


def check_updates_elsewhere(cluster: Cluster, options: PlanOptions, trains: bool) -> None:
    """Refuse what updates on other devices do not go with; one error names all of it."""
    if not options.update_on:
        return
    known = [device.name for device in cluster.devices]
    problems = [] if trains else ["an inference has no updates: compile with --loss"]
    strange = [name for name in updaters(options.update_on) if name not in known]
    problems += [f"{name!r} is no device of the cluster, which has {', '.join(known)}" for name in strange]
    computing = {name for names in options.devices for name in names}
    problems += [f"{name} computes a stage as well" for name in updaters(options.update_on) if name in computing]
    problems += ["no device is left to compute"] if {*known} <= {*updaters(options.update_on)} else []
    if options.zero:
        problems.append("--zero: replicas update their own parts of variables")
    if options.mesh and not options.zero:
        problems.append("--mesh: tensors that are split are updated where they lie")
    if options.offload in ("weights", "all"):
        problems.append(f"--offload {options.offload}: gradients that are handed out do not go with their weights")
    if problems:
        raise UsageError(f"--update-on {options.update_on} cannot be:" + itemised(problems))


def _devices_of_stages(options: PlanOptions) -> tuple[tuple[str, ...], ...]:
    """Return the devices that each stage is given; a flat list of names, which may mean several things, is refused."""
    flat = [names for names in options.devices if isinstance(names, str)]
    if flat:
        listed = ", ".join(repr([name]) for name in flat)
        raise UsageError(
            f"devices lists the devices of every stage, and {', '.join(map(repr, flat))} "
            f"{'is' if len(flat) == 1 else 'are'} no list",
            hint=f"devices=[{listed}] gives each a stage, devices=[{flat}] makes them replicas of one",
        )
    return tuple(map(tuple, options.devices))


def _are_unlike(options: PlanOptions) -> bool:
    """Return whether stages that share variables out have unlike numbers of replicas, which no one mesh says."""
    return bool(options.zero) and ";" not in options.mesh and len({len(names) for names in options.devices}) > 1


def _in_groups(cluster: Cluster, options: PlanOptions) -> tuple[tuple[str, ...], ...]:
    """Return the devices of every stage, in the order of the cluster; none are named where each stage has one."""
    stages, replicas, updating = options.stages, _devices_per_stage(options), updaters(options.update_on)
    if ";" in options.mesh:
        return _in_unlike_groups(cluster, options)
    if replicas == 1 and not updating:
        return ()
    names = [device.name for device in cluster.devices if device.name not in updating]
    if not stages and options.split_at:
        stages = (len(options.split_at) + 1) // options.packs
    count = stages or len(names) // replicas
    if replicas < 1 or count < 1 or count * replicas > len(names):
        what = (
            f"{counted(max(count, 1), 'stage')} of {counted(replicas, 'device')} each need "
            f"{max(count, 1) * replicas}, the cluster has {len(names)}"
            + (f" beside those for updates, {', '.join(updating)}" if updating else "")
        )
        raise UsageError(what, hint="add devices, or ask for fewer stages or replicas")
    return tuple(tuple(names[s * replicas : (s + 1) * replicas]) for s in range(count))


def _in_unlike_groups(cluster: Cluster, options: PlanOptions) -> tuple[tuple[str, ...], ...]:
    """Return the devices of every stage, in the order of the cluster, where stages have a mesh each."""
    widths = [prod(mesh.values()) for mesh in stage_meshes(options.mesh)]
    names = [device.name for device in cluster.devices]
    if options.stages not in (0, len(widths)):
        raise UsageError(
            f"the meshes {options.mesh!r} are those of {counted(len(widths), 'stage')}, {options.stages} are asked for"
        )
    if sum(widths) > len(names):
        raise UsageError(f"the meshes {options.mesh!r} need {sum(widths)} devices, the cluster has {len(names)}")
    ends = list(accumulate(widths))
    return tuple(tuple(names[end - width : end]) for width, end in zip(widths, ends, strict=True))


def _check_alike(cluster: Cluster, stages: Sequence[Sequence[str]]) -> None:
    """Refuse stages whose devices cannot run the same code. One error names all of them."""
    known = {device.name: f"{device.kind} {device.target}" for device in cluster.devices}
    problems = []
    for number, names in enumerate(stages):
        codes: dict[str, list[str]] = {}
        for name in names:
            if name in known:
                codes.setdefault(known[name], []).append(name)
        if len(codes) > 1:
            groups = [f"{', '.join(devices)} of {code}" for code, devices in codes.items()]
            problems.append(f"stage {number} has {' and '.join(groups)}")
    if problems:
        raise UsageError(
            "the devices of a stage run the same code:" + itemised(problems),
            hint="name the devices of each stage, or list them in another order",
        )


def _devices_per_stage(options: PlanOptions) -> int:
    """Return the devices of a stage: its replicas, or what the axes of its mesh make."""
    if not options.mesh:
        if any(text != NONE for text in options.shard):
            raise UsageError("layouts are given, but no mesh", hint="name its axes, such as --mesh tp=2")
        return options.replicas
    if options.replicas != 1:
        raise UsageError("--replicas and --mesh both say how many devices a stage has", hint="the axis dp is replicas")
    return prod(parse_mesh(options.mesh).values())


def _shares(cluster: Cluster, options: PlanOptions) -> tuple[int, ...]:
    """Return the microbatches of a batch that each device runs, stage by stage; none are named for packs of stages,
    which have equal ones. Nor are they where devices do not fit the mesh, which `partition` refuses."""
    if options.packs > 1:
        if options.shares:
            raise UsageError("pipelines of packs share microbatches out equally", hint="leave out shares")
        return ()
    mesh = "" if _are_unlike(options) else options.mesh
    meshes = mesh.split(";")
    meshes = meshes * len(options.devices) if len(meshes) == 1 else meshes
    if mesh and [len(names) for names in options.devices] != [prod(parse_mesh(text).values()) for text in meshes]:
        return ()
    shares: Sequence[Sequence[int]] = options.shares or [
        fair_shares(_rates(cluster, names, text), options.microbatches)
        for names, text in zip(options.devices, meshes, strict=False)
    ]
    return tuple(share for of_stage in shares for share in of_stage)


def _rates(cluster: Cluster, names: Sequence[str], axes: str) -> list[float]:
    """Return the rates of the teams of a stage: each is as fast as the slowest of its devices."""
    mesh = Mesh("", tuple(parse_mesh(axes).items() if axes else [(REPLICAS, len(names))]), tuple(names))
    return [min(cluster.device(names[place]).flops for place in team) for team in mesh.teams()]
