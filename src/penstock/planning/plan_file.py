"""A plan as a file that people may edit: what `penstock plan --json` prints, and plan.json of a bundle.

In: a path. Out: options of `ps.plan`.

Read are `schedule`, `microbatches`, `samples_per_microbatch`, `precision`, `wire`, `recompute`, `offload`, `spill`,
`update_on`, `mesh`, `shard`, `zero` and of every stage its `devices`, their `shares` and what it `starts_at`: a node or
value of the model (nothing for the first stage). With a mesh there is a share for each of its replicas.
Everything else in such a file says what was predicted, and is not read. All problems are reported in one error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.ir.graph import REPLICAS
from penstock.ir.schedule import MOST_MICROBATCHES
from penstock.passes.communicate.wire import WIRES
from penstock.passes.memory.recompute import MODES
from penstock.passes.rewrite.precision import PRECISIONS
from penstock.passes.schedules.dealing import equal_shares
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES, build_packs, single_like
from penstock.passes.sharding.given import parse_mesh
from penstock.support.errors import UsageError
from penstock.support.words import itemised

from .options import OFFLOADS

_READ = (
    "schedule",
    "microbatches",
    "samples_per_microbatch",
    "precision",
    "wire",
    "recompute",
    "offload",
    "spill",
    "update_on",
    "mesh",
    "shard",
    "zero",
    "stages",
)
_TOLD = ("memory", "model", "notes", "pipeline", "planner", "predicted", "prices", "rates")
_CHOICES: dict[str, Iterable[str]] = {
    "recompute": MODES,
    "precision": PRECISIONS,
    "wire": WIRES,
    "offload": OFFLOADS,
}
_STAGE = ("stage", "starts_at", "devices", "shares")
_TOLD_OF_STAGE = ("modules",)


def load_plan_file(path: str | Path, devices: Sequence[str]) -> tuple[dict[str, Any], int | None]:
    """Return options for `ps.plan` that carry the plan out on some of these devices, and the samples per microbatch if
    the file says how many."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read the plan: {error}", where=str(path), hint="`penstock plan --json` prints one"
        ) from error
    if not isinstance(content, dict):
        raise UsageError("is not a plan: expected an object", where=str(path), hint="`penstock plan --json` prints one")
    problems = [
        f"unknown key {key!r}, expected {', '.join((*_READ, *_TOLD))}" for key in content if key not in (*_READ, *_TOLD)
    ]
    problems += [f"{key} is missing" for key in ("schedule", "microbatches", "stages") if key not in content]
    schedule = content.get("schedule", "1f1b")
    if schedule not in [*SCHEDULES, *PACK_SCHEDULES]:
        problems.append(f"schedule {schedule!r} is none of {', '.join([*SCHEDULES, *PACK_SCHEDULES])}")
    problems += [
        f"{name} {content[name]!r} is none of {', '.join(words)}"
        for name, words in _CHOICES.items()
        if name in content and content[name] not in list(words)
    ]
    count = content.get("microbatches", 1)
    counts = type(count) is int and 1 <= count <= MOST_MICROBATCHES
    if not counts:
        problems.append(f"microbatches must be a number from 1 to {MOST_MICROBATCHES}, got {count!r}")
    samples = content.get("samples_per_microbatch")
    if samples is not None and (type(samples) is not int or not 1 <= samples < 2**31):
        problems.append(f"samples_per_microbatch must be a number from 1 on, got {samples!r}")
    if not isinstance(content.get("spill", ""), str):
        problems.append(f"spill must be a folder or the name of a memory space, got {content['spill']!r}")
    if not isinstance(content.get("update_on", ""), str):
        problems.append(f"update_on must be names of devices with commas between, got {content['update_on']!r}")
    replicas = _replicas(content, problems)
    stages = _listed_stages(content, problems)
    for number, stage in enumerate(stages):
        problems += [
            f"stage {number}: {problem}"
            for problem in _stage_problems(number, stage, count if counts else None, replicas)
        ]
    packed = schedule in list(PACK_SCHEDULES)
    problems += _device_problems(stages, devices, packed)
    problems += _pack_problems(schedule, stages, count) if packed and not problems else []
    if problems:
        raise UsageError("the plan has problems:" + itemised(problems), where=str(path))
    options = {
        "schedule": schedule,
        "microbatches": count,
        "recompute": content.get("recompute", "auto"),
        "split_at": [stage["starts_at"] for stage in stages[1:]],
        **_placed(stages, count, packed),
    }
    return options | {
        name: content[name]
        for name in ("precision", "wire", "mesh", "shard", "zero", "offload", "spill", "update_on")
        if name in content
    }, samples


def _listed_stages(content: dict[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    """Return the stages, none where they are no list of objects, which is added to the problems."""
    stages: Any = content.get("stages", [])
    are_objects = isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)
    if are_objects and (stages or "stages" not in content):
        return list(stages)
    problems.append("stages must be a list of objects, one or more")
    return []


def _replicas(content: dict[str, Any], problems: list[str]) -> int | None:
    """Return the replicas of every stage on a mesh, None without one, and add what is wrong with mesh and layouts."""
    mesh, shard = content.get("mesh", ""), content.get("shard", [])
    if not isinstance(shard, list) or not all(isinstance(text, str) for text in shard):
        problems.append(f"shard must be a list of layouts, got {shard!r}")
    try:
        return parse_mesh(str(mesh)).get(REPLICAS, 1) if mesh else None
    except UsageError as error:
        problems.append(error.what)
        return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return content


def _placed(stages: list[dict[str, Any]], count: int, packed: bool) -> dict[str, Any]:
    """Return the options that say which devices run which stages, and how many microbatches each."""
    if not packed:
        return {
            "devices": [stage["devices"] for stage in stages],
            "shares": [stage.get("shares", [count]) for stage in stages],
        }
    groups = _groups_of(stages)
    return {"devices": list(map(list, groups)), "packs": len(stages) // len(groups)}


def _groups_of(stages: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the devices of each pack of a plan with packs, in the order of ranks."""
    return list(dict.fromkeys(tuple(stage["devices"]) for stage in stages))


def _pack_problems(schedule: str, stages: list[dict[str, Any]], count: int) -> list[str]:
    """List what is wrong with the devices of stages under a schedule for packs: each has as many stages, dealt in the
    order of the schedule. Several devices of a stage have all stages of its pack, and equal shares."""
    groups, kind = _groups_of(stages), PACK_SCHEDULES[schedule]
    names = [name for group in groups for name in group]
    if len({*names}) < len(names) or len({*map(len, groups)}) > 1:
        return [f"schedule {schedule} has the same devices for all stages of a pack, as many for each pack"]
    if len(stages) % len(groups):
        return [f"{len(stages)} stages cannot be dealt out evenly to {len(groups)} devices"]
    if len(stages) == len(groups):
        instead = single_like(schedule)
        return [f"schedule {schedule} runs several stages on each device, here each has one; use {instead}"]
    packs, share = kind.packs(len(groups), len(stages) // len(groups)), stages[0].get("shares", [count])
    try:
        if any(stage.get("shares", [count]) != list(equal_shares(len(share), count)) for stage in stages):
            return [f"schedule {schedule} has equal shares for all devices of a pack, here they are others"]
        build_packs(schedule, packs, count, share)
    except UsageError as error:
        return [error.what]
    wanted = {stage: list(group) for group, dealt in zip(groups, packs, strict=True) for stage in dealt}
    return [
        f"stage {number}: under {schedule} it is on {' '.join(wanted[number])}, not on {' '.join(stage['devices'])}"
        for number, stage in enumerate(stages)
        if stage["devices"] != wanted[number]
    ]


def _device_problems(stages: list[dict[str, Any]], known: Sequence[str], packed: bool) -> list[str]:
    """List devices that are not there, or run two ranks: only where stages are `packed`, a device may have several."""
    seats: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        listed = stage.get("devices")
        for name in listed if isinstance(listed, list) else ():
            if isinstance(name, str):
                seats.setdefault(name, []).append(number)
    problems = [
        f"stage {seats[name][0]}: no device {name!r} in the cluster, it has {', '.join(known)}"
        for name in seats
        if name and name not in known
    ]
    for name, numbers in seats.items():
        if len(numbers) > 1 and not (packed and len(set(numbers)) == len(numbers)):
            where = (
                f"stages {', '.join(map(str, dict.fromkeys(numbers)))}"
                if len(set(numbers)) > 1
                else f"stage {numbers[0]}"
            )
            problems.append(f"{where}: device {name!r} is listed {len(numbers)} times, and can be one rank")
    return problems


def _stage_problems(
    number: int, stage: dict[str, Any], microbatches: int | None, replicas: int | None = None
) -> list[str]:
    """List the problems of a stage. `microbatches` is None where the file does not say; `replicas` are those of a
    mesh, without which each device is one."""
    known = (*_STAGE, *_TOLD_OF_STAGE)
    problems = [f"unknown key {key!r}, expected {', '.join(_STAGE)}" for key in stage if key not in known]
    if stage.get("stage", number) != number:
        problems.append(f"stands in the place of stage {number}, but says it is stage {stage['stage']!r}")
    start = stage.get("starts_at")
    if number and not (isinstance(start, str) and start):
        problems.append("needs `starts_at`, the node or value that it begins with")
    if not number and start is not None:
        problems.append(f"is the first and begins with the model, not at {start!r}")
    devices = stage.get("devices")
    if (
        not isinstance(devices, list)
        or not devices
        or not all(isinstance(name, str) and name and not name.split()[1:] for name in devices)
    ):
        problems.append("needs `devices`, a list of names")
        return problems
    shares, count = stage.get("shares"), len(devices) if replicas is None else replicas
    if shares is None:
        problems += ["needs `shares`, as it has several devices"] if count > 1 else []
    elif not isinstance(shares, list) or not all(type(n) is int for n in shares) or len(shares) != count:
        problems.append(
            f"`shares` must be a number of microbatches for each {'device' if replicas is None else 'replica'}"
        )
    elif microbatches is None:
        problems += ["`shares` must be 1 or more each"] if min(shares) < 1 else []
    elif sum(shares) != microbatches or min(shares) < 1:
        problems.append(
            f"`shares` must be 1 or more each and {microbatches} together, got {', '.join(map(str, shares))}"
        )
    return problems
