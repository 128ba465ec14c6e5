"""Plan a bundle anew for the devices that are left.

In: a bundle, some of its devices, in the order of ranks. Out: a bundle of the same model for these.

    python -m penstock.planning.replan '{"bundle": ..., "devices": [...], "out": ..., "parent": process}'
        prints {"bundle": ..., "told": ...} or the error as JSON

The bundle keeps the model before it was cut, with its loss, gradients and updates (reference.ir), and the passes that
it went through (plan.json). All passes from `partition` on are run again, with the same schedule, microbatches and
precision. Where every stage still has a device, stages keep the devices that they have left, else each device gets a
stage. Where to cut is searched for again, and shares are dealt again. Checkpoints of the model load under both plans.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.backends.bundle.format import NAMES, SOURCE, Bundle, Origin, open_bundle
from penstock.backends.interface import CompileOptions
from penstock.ir.cluster.cluster import Cluster
from penstock.passes.manager import Call, parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.passes.schedules.dealing import fair_shares
from penstock.support.errors import PenstockError, UsageError
from penstock.support.words import counted

from .build import Content, assemble
from .facts import describe_plan
from .predict import predict


def replan(bundle: Bundle, devices: Sequence[str], out: Path) -> str:
    """Write the bundle for these devices; return the plan in words."""
    reference, pipeline = bundle.reference, bundle.plan.get("pipeline")
    if reference is None or reference.cluster is None or not isinstance(pipeline, str):
        raise UsageError(
            "does not have the model before it was cut, so it cannot be planned anew", where=str(bundle.path)
        )
    cluster = _without(reference.cluster, devices)
    schedule = bundle.module.schedule
    assert schedule is not None
    groups = _groups(bundle, devices)
    shares = [fair_shares([cluster.device(name).flops for name in names], schedule.microbatches) for names in groups]
    calls = _calls(pipeline, groups, tuple(share for of_stage in shares for share in of_stage))
    module = run_passes(reference.but(cluster=cluster), calls, PASSES)
    before = parse_pipeline(pipeline, PASSES)
    every = [*before[: len(before) - len(calls)], *calls]
    facts = describe_plan(module, reference, every, predict(module))
    weights, origin = bundle.weights(), _origin(bundle)
    content = Content(module, reference, weights, facts, bundle.manifest.source_hash, lambda folder: origin)
    assemble(out, content, bundle.manifest.backend, CompileOptions())
    used = " ".join("+".join(names) for names in groups)
    return (
        f"{counted(len(groups), 'stage')} on {used}, schedule {schedule.name} with "
        f"{counted(schedule.microbatches, 'microbatch')}"
    )


def _origin(bundle: Bundle) -> Origin | None:
    """Return the source that a bundle keeps, to be kept again."""
    if NAMES not in bundle.manifest.files:
        return None
    files = sorted(name for name in bundle.manifest.files if name.startswith(f"{SOURCE}/") and name != NAMES)
    return Origin(bundle.source_names or {}, [bundle.path / name for name in files])


def _without(cluster: Cluster, devices: Sequence[str]) -> Cluster:
    """Return the cluster with these devices alone, in this order."""
    links = tuple(link for link in cluster.links if link.a in devices and link.b in devices)
    return replace(cluster, devices=tuple(cluster.device(name) for name in devices), links=links)


def _groups(bundle: Bundle, devices: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the devices of every stage."""
    stage_of = {entry.device: entry.stage for entry in bundle.manifest.ranks}
    remaining = [tuple(name for name in devices if stage_of[name] == stage.index) for stage in bundle.module.stages]
    # The ranks of the plan have to be those of the devices as they are given.
    if all(remaining) and [name for names in remaining for name in names] == list(devices):
        return remaining
    return [(name,) for name in devices]


def _calls(pipeline: str, groups: Sequence[Sequence[str]], shares: tuple[int, ...]) -> list[Call]:
    """Return the passes from `partition` on, for other devices."""
    calls = parse_pipeline(pipeline, PASSES)
    first = next(i for i, call in enumerate(calls) if call.name == "partition")
    placed: dict[str, Any] = {
        "stages": 0,
        "split_at": (),
        "devices": tuple(" ".join(names) for names in groups),
        "shares": shares,
    }
    changes: dict[str, dict[str, Any]] = {"partition": placed, "schedule": {"shares": shares}}
    return [Call(call.name, replace(call.options, **changes.get(call.name, {}))) for call in calls[first:]]


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
