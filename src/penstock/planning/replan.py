"""Plan a bundle anew for the devices that are left.

In: a bundle, some of its devices, in the order of ranks. Out: a bundle of the same model for these.

    python -m penstock.planning.replan '{"bundle": ..., "devices": [...], "out": ..., "parent": process}'
        prints {"bundle": ..., "told": ...} or the error as JSON

The bundle keeps the model before it was cut, with its loss, gradients and updates (reference.ir), and the passes that
it went through (plan.json). All passes from `partition` on are run again, with the same schedule, microbatches and
precision. Where every stage still has a device, stages keep the devices that they have left, else each device gets a
stage. Where to cut is searched for again, and shares are dealt again. Checkpoints of the model load under both plans.

With tensors that are split over a mesh, a team of devices takes the place of one device: the product of all axes but
`dp`. Stages keep what they have left where that makes as many whole teams of each. Else each team gets a stage; where
devices do not make whole teams, axes become shorter by a common divisor, which may be 1. Where stages have a mesh each,
they keep these and their cuts as long as each has as many whole teams of its own. Else all get one mesh: the team that
is the largest of those before. Levels 2 and 3 of zero need equal shares; where shares become unequal, the level becomes
1.

Where a device has several stages, it keeps as many. Where the schedule cannot deal the microbatches to so few devices,
each device gets one stage under 1f1b, or 2bw where gradients are late, which computes the same; weights then stay on
the device.

Devices that only update weights stay what they are, if they come behind all that compute: ranks are in the order of the
devices. Where stages have no weights for so many of them, the first ones compute. Where none of them is left, stages
update their own weights; where no other is left, they compute.

The runtime starts this as a process of its own: it may not import passes, and a launcher that lives for days has no use
for them.

Known limits: cuts are searched for as `penstock plan` without --batch does it: the schedule and the microbatches stay.
The code is compiled for this host.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from penstock.backends.bundle.format import NAMES, SOURCE, Bundle, Origin, open_bundle
from penstock.backends.interface import CompileOptions
from penstock.ir.batch_shares import updating_stages
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import REPLICAS, Module
from penstock.passes.manager import Call, parse_pipeline, run_passes
from penstock.passes.memory.offload import ACTIVATIONS, ALL, BOTH, STATE, WEIGHTS
from penstock.passes.partition.devices import Axes, StageDevices, mesh_axes
from penstock.passes.partition.modules import OPERATION
from penstock.passes.pipelines import PASSES
from penstock.passes.schedules.dealing import equal_shares, fair_shares
from penstock.passes.schedules.schedule import PACK_SCHEDULES, build_packs, single_like
from penstock.support.errors import PenstockError, UsageError
from penstock.support.words import counted

from .build import Content, assemble
from .facts import describe_plan
from .pipeline import with_devices
from .predict import predict

# What may still be elsewhere where all of a kind cannot be.
_LESS = {ALL: (BOTH, STATE, ACTIVATIONS), BOTH: (STATE, ACTIVATIONS), WEIGHTS: (STATE,)}


def replan(bundle: Bundle, devices: Sequence[str], out: Path) -> str:
    """Write the bundle for these devices; return the plan in words."""
    reference, pipeline = bundle.reference, bundle.plan.get("pipeline")
    if reference is None or reference.cluster is None or not isinstance(pipeline, str):
        raise UsageError(
            "does not have the model before it was cut, so it cannot be planned anew", where=str(bundle.path)
        )
    before = parse_pipeline(pipeline, PASSES)
    first = next(i for i, call in enumerate(before) if call.name == "partition")
    cluster, updating = with_devices(reference.cluster, devices), _updating(bundle, devices)
    meshes = [mesh_axes(text) for text in before[first].options.mesh.split(";")]
    while True:
        placed = _roles(bundle, cluster, meshes, updating)
        calls = _changed(_updated_on(before[first:], updating), placed, bundle)
        done, module = _carried_out(reference.but(cluster=cluster), calls)
        if len(module.rank_devices()) == len(devices) or not updating:
            break
        # There are no weights for so many devices: the first of them computes.
        updating = updating[1:]
    every = [*before[:first], *done]
    facts = describe_plan(module, reference, every, predict(module))
    weights, origin = bundle.weights(), _origin(bundle)
    content = Content(module, reference, weights, facts, bundle.manifest.source_hash, lambda folder: origin)
    assemble(out, content, bundle.manifest.backend, CompileOptions())
    return _summary(before, every, bundle, placed)


def _roles(bundle: Bundle, cluster: Cluster, meshes: Sequence[Axes], updating: Sequence[str]) -> StageDevices:
    """Return the devices of every stage, without those that update weights alone."""
    computing = with_devices(cluster, [device.name for device in cluster.devices if device.name not in updating])
    placed = _placed(bundle, computing, meshes)
    if placed.unlike and bundle.module.packs and not _packs(bundle, placed):
        return _on_one_mesh(computing, meshes)
    return placed


def _updating(bundle: Bundle, devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that can go on to update weights alone: those behind all others, none where these are all."""
    stages = updating_stages(bundle.module)
    before = {name for stage in stages for name in bundle.module.devices_of(stage)}
    first = max((i + 1 for i, name in enumerate(devices) if name not in before), default=len(devices))
    return tuple(devices[first:])


def _updated_on(calls: Sequence[Call], updating: tuple[str, ...]) -> list[Call]:
    """Return the passes with updates on these devices, or on those of stages."""
    changes: dict[str, dict[str, Any]] = {
        "partition": {"updates_elsewhere": bool(updating)},
        "update-on": {"devices": updating},
    }
    return [
        Call(call.name, replace(call.options, **changes.get(call.name, {})))
        for call in calls
        if updating or call.name != "update-on"
    ]


def _computing_stages(bundle: Bundle) -> list[int]:
    """Return the stages that compute microbatches; of a pack, the first one stands for all."""
    updating = updating_stages(bundle.module)
    return [stage for stage in dict.fromkeys(bundle.module.rank_stages()) if stage not in updating]


def _carried_out(module: Module, calls: Sequence[Call]) -> tuple[Sequence[Call], Module]:
    """Run the passes. On other devices nothing may be gained by some of what is elsewhere: less is then. There may be
    more stages than modules: they are cut at any operation then. Any other error comes again with the last of these."""
    refused: UsageError | None = None
    for fewer in _with_less(calls):
        try:
            return fewer, run_passes(module, fewer, PASSES)
        except UsageError as error:
            refused = error
    assert refused is not None
    raise refused


def _with_less(calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
    """Yield the calls, with all and less elsewhere, then the same with cuts at any operation."""
    yield from _moving_less(calls)
    cut = calls[0]
    if cut.options.split_by != OPERATION:
        yield from _moving_less([Call(cut.name, replace(cut.options, split_by=OPERATION)), *calls[1:]])


def _moving_less(calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
    """Yield the calls, then with less that is elsewhere, each also in any space that devices reach, then with
    nothing."""
    what, space = next(((c.options.what, c.options.space) for c in calls if c.name == "offload"), ("", ""))
    for less in (what, *_LESS.get(what, ())):
        for home in dict.fromkeys((space, "")):
            changes = {"what": less, "space": home}
            yield [
                Call(call.name, replace(call.options, **changes)) if call.name == "offload" else call for call in calls
            ]
    if what:
        yield [call for call in calls if call.name != "offload"]


def _origin(bundle: Bundle) -> Origin | None:
    """Return the source that a bundle keeps, to be kept again."""
    if NAMES not in bundle.manifest.files:
        return None
    files = sorted(name for name in bundle.manifest.files if name.startswith(f"{SOURCE}/") and name != NAMES)
    return Origin(bundle.source_names or {}, [bundle.path / name for name in files])


def _placed(bundle: Bundle, cluster: Cluster, meshes: Sequence[Axes]) -> StageDevices:
    """Return the devices of every stage, and the axes of their meshes. `meshes` are those of the plan before: one for
    all stages, or one for each."""
    devices = [device.name for device in cluster.devices]
    stage_of = {entry.device: entry.stage for entry in bundle.manifest.ranks}
    remaining = [tuple(name for name in devices if stage_of[name] == stage) for stage in _computing_stages(bundle)]
    each_mesh = meshes if len(meshes) > 1 else [*meshes] * len(remaining)
    teams = [tuple((axis, size) for axis, size in axes if axis != REPLICAS) for axes in each_mesh]
    sizes = [prod(size for _, size in team) for team in teams]
    whole = [divmod(len(names), size) for names, size in zip(remaining, sizes, strict=True)]
    # The ranks of the plan have to be those of the devices as they are given.
    stay = all(remaining) and [name for names in remaining for name in names] == devices
    if stay and max(sizes) == 1:
        return StageDevices(tuple(tuple(map(cluster.device, names)) for names in remaining))
    if stay and len({count for count, _ in whole}) == 1 and not any(left for _, left in whole):
        kept = [tuple((axis, whole[0][0] if axis == REPLICAS else n) for axis, n in axes) for axes in each_mesh]
        groups = tuple(tuple(map(cluster.device, names)) for names in remaining)
        return StageDevices(groups, kept[0]) if len(meshes) == 1 else StageDevices(groups, unlike=tuple(kept))
    return _on_one_mesh(cluster, meshes)


def _on_one_mesh(cluster: Cluster, meshes: Sequence[Axes]) -> StageDevices:
    """Give each team a stage: the largest team of these meshes, shorter where devices do not make whole ones."""
    teams = [tuple((axis, size) for axis, size in axes if axis != REPLICAS) for axes in meshes]
    axes = _shorter(max(teams, key=lambda team: prod(size for _, size in team)), len(cluster.devices))
    each = prod(size for _, size in axes)
    firsts = range(0, len(cluster.devices), each)
    return StageDevices(tuple(cluster.devices[at : at + each] for at in firsts), axes)


def _shorter(axes: Axes, devices: int) -> Axes:
    """Return the axes with divisors of their sizes: the largest teams of which there are whole ones alone. No axes
    where a team is one device."""
    divisors = [[n for n in range(size, 0, -1) if not size % n] for _, size in axes]
    sizes = max((each for each in product(*divisors) if not devices % prod(each)), key=prod)
    return tuple((axis, size) for (axis, _), size in zip(axes, sizes, strict=True)) if prod(sizes) > 1 else ()


def _changed(calls: Sequence[Call], placed: StageDevices, bundle: Bundle) -> list[Call]:
    """Return the passes from `partition` on, for other devices."""
    assert bundle.module.schedule is not None
    packed, microbatches = _packs(bundle, placed), bundle.module.schedule.microbatches
    # Pipelines of packs have equal shares, as far as these divide.
    dealt = [
        equal_shares(len(teams), microbatches) if packed else fair_shares([team.flops for team in teams], microbatches)
        for teams in placed.teams()
    ]
    shares = () if packed else tuple(share for of_stage in dealt for share in of_stage)
    partitioned: dict[str, Any] = {
        "stages": 0,
        "split_at": calls[0].options.split_at if placed.unlike else (),
        "pins": calls[0].options.pins if _as_many_stages(bundle, placed) else (),
        "devices": tuple(" ".join(device.name for device in group) for group in placed.groups),
        "shares": shares,
        "mesh": ";".join(",".join(f"{axis}={size}" for axis, size in axes) for axes in placed.unlike or [placed.axes]),
    }
    changes: dict[str, dict[str, Any]] = {"partition": partitioned, "schedule": {"shares": shares}}
    if bundle.module.schedule.name in PACK_SCHEDULES and not packed:
        single = single_like(next(call.options.kind for call in calls if call.name == "schedule"))
        partitioned |= {"packs": 1, "folded": False, "schedule": single}
        changes["schedule"]["kind"] = single
        # One stage has its weights on its device all the time.
        what = next((call.options.what for call in calls if call.name == "offload"), STATE)
        changes["offload"] = {"what": {WEIGHTS: STATE, ALL: BOTH}.get(what, what)}
    if any(len({*of_stage}) > 1 for of_stage in dealt):
        # Replicas with unequal shares cannot meet in every microbatch.
        changes["zero"] = {"level": 1}
    return [Call(call.name, replace(call.options, **changes.get(call.name, {}))) for call in calls]


def _as_many_stages(bundle: Bundle, placed: StageDevices) -> bool:
    """Return whether there are as many stages as before, so that their numbers mean the same."""
    return not bundle.module.packs and len(placed.groups) == len(_computing_stages(bundle))


def _packs(bundle: Bundle, placed: StageDevices) -> bool:
    """Return whether devices can have several stages each, as those of the bundle do: packs have as many devices each,
    and some schedules deal microbatches in equal groups."""
    module, schedule, teams = bundle.module, bundle.module.schedule, placed.teams()
    if not module.packs or schedule is None or len({*map(len, teams)}) > 1:
        return False
    packs = PACK_SCHEDULES[schedule.name].packs(len(teams), len(module.packs[0]))
    try:
        build_packs(schedule.name, packs, schedule.microbatches, equal_shares(len(teams[0]), schedule.microbatches))
    except UsageError:
        return False
    return True


def _summary(before: Sequence[Call], after: Sequence[Call], bundle: Bundle, placed: StageDevices) -> str:
    """Return the plan in words."""
    schedule = bundle.module.schedule
    assert schedule is not None
    used = " ".join("+".join(device.name for device in group) for group in placed.groups)
    levels = [next((call.options.level for call in calls if call.name == "zero"), 0) for calls in (before, after)]
    lower = "" if levels[0] == levels[1] else f", level {levels[1]} of zero as shares are unequal"
    packs = next(call.options.packs for call in after if call.name == "partition")
    stages = f"{counted(len(placed.groups), 'stage')} on {used}" if packs == 1 else f"{packs} stages on each of {used}"
    kind = next(call.options.kind for call in after if call.name == "schedule")
    other = "" if kind == schedule.name else f", as {schedule.name} cannot deal them to packs"
    cuts = [next(call.options for call in calls if call.name == "partition") for calls in (before, after)]
    pins = "" if cuts[0].pins == cuts[1].pins else ", without pins, as the number of stages is another"
    here = _updates_words(before, after, placed)
    here += ", one mesh for all stages" if ";" in cuts[0].mesh and ";" not in cuts[1].mesh else ""
    places = "" if cuts[0].split_by == cuts[1].split_by else ", cut at any operation, as modules do not make them"
    notes = f"{other}{lower}{pins}{places}{here}"
    return f"{stages}, schedule {kind} with {counted(schedule.microbatches, 'microbatch')}{notes}"


def _updates_words(before: Sequence[Call], after: Sequence[Call], placed: StageDevices) -> str:
    """Say where updates are, if that is no longer what it was: no device that computed becomes one that updates."""
    was, now = (next((call for call in calls if call.name == "update-on"), None) for calls in (before, after))
    if was is None:
        return ""
    turned = [device.name for group in placed.groups for device in group if device.name in was.options.devices]
    verb = "computes" if len(turned) == 1 else "compute"
    words = f", {' and '.join(turned)} {verb} instead of updating" if turned else ""
    return words + (", updates on the devices of stages, as no other is left for them" if now is None else "")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(argv: Sequence[str]) -> int:
    request = json.loads(argv[0])
    # The launcher that started this process may be killed, and then there is no reader of the answer.
    threading.Thread(target=_end_with, args=(request["parent"],), daemon=True).start()
    try:
        answer = {
            "bundle": request["out"],
            "told": replan(open_bundle(request["bundle"]), request["devices"], Path(request["out"])),
        }
        code = 0
    except PenstockError as error:
        answer = {"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}
        code = error.exit_code
    print(json.dumps(answer), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
