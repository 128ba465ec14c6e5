"""`penstock plan BUNDLE --grade METRICS`: a run against the plan of its bundle, as a table.

Corrections are kept (calibration/grade.py).
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.support.errors import UsageError
from penstock.support.terminal import say, table
from penstock.support.words import counted

if TYPE_CHECKING:
    from penstock.backends.bundle.format import Bundle
    from penstock.calibration.grade import Graded

# The arguments of a grade.
_OF_GRADES = ("command", "model", "grade", "trace", "json", "verbose")


def run(arguments: Namespace) -> None:
    """Grade the plan of a bundle by a run of it."""
    from penstock.backends.bundle.format import open_bundle  # lazy: heavy
    from penstock.calibration.grade import grade  # lazy: heavy

    if other := [name for name in arguments.given if name not in _OF_GRADES]:
        flags = ", ".join("--" + name.replace("_", "-") for name in other)
        raise UsageError(
            f"{flags} with --grade: it compares a run with the plan of its bundle",
            hint="leave out all that asks for another plan",
        )
    if not arguments.model or not Path(arguments.model).is_dir():
        raise UsageError(
            "--grade compares a run with the plan of its bundle", hint="penstock plan BUNDLE --grade metrics.jsonl"
        )
    bundle = open_bundle(arguments.model)
    graded = grade(bundle, Path(arguments.grade), Path(arguments.trace) if arguments.trace else None)
    if arguments.json:
        print(json.dumps(as_dict(graded), indent=2))
        return
    rows = [
        _row("step", "", graded.predicted, graded.measured),
        *(_row(f"rank {rank}", kind, a, b) for rank, kind, a, b in graded.computing),
    ]
    print(table(["what", "", "predicted", "measured", "measured / predicted"], rows))
    say(f"{counted(graded.steps, 'step')} counted; {_kept(graded, arguments.trace, bundle)}")


def _row(what: str, kind: str, predicted: float, measured: float) -> list[str]:
    from penstock.passes.costs.prices import shown_seconds  # lazy: heavy

    return [
        what,
        kind,
        shown_seconds(predicted),
        shown_seconds(measured),
        f"{measured / predicted:.2f}" if predicted else "-",
    ]


def _kept(graded: Graded, trace: str | None, bundle: Bundle) -> str:
    from penstock.calibration.grade import PLAUSIBLE  # lazy: heavy
    from penstock.calibration.measured import is_here  # lazy: heavy

    if graded.kept:
        return f"kept {graded.factor:.2f} as a correction for this machine's processor"
    if graded.factor is not None and bundle.manifest.backend == "tvm":
        low, high = PLAUSIBLE
        return (
            f"warning: work took {graded.factor:.3g} times as long; that is not kept, as corrections are from {low:g} "
            f"to {high:g}: was the machine busy, is the cluster file of this machine?"
        )
    if graded.factor is not None:
        return (
            f"work took {graded.factor:.2f} times as long; that is not kept, as it is of {bundle.manifest.backend}, "
            "not of compiled code"
        )
    cluster = bundle.module.cluster
    if cluster is None or not any(map(is_here, cluster.devices)):
        return "no correction is kept, as no device of the plan is this machine's processor"
    others = "launches and calls" if trace else "links, messages and calls"
    more = "" if trace else "; a run with --trace tells them apart: give its trace, too"
    return f"no correction is kept, as {others} alone are more than half of the time{more}"


def as_dict(graded: Graded) -> dict[str, Any]:
    """Return a grade as plain data."""
    return {
        "predicted_s": graded.predicted,
        "measured_s": graded.measured,
        "ratio": graded.measured / graded.predicted,
        "steps": graded.steps,
        "correction": graded.factor if graded.kept else None,
        "computing": [
            {"rank": rank, "kind": kind, "predicted_s": a, "measured_s": b} for rank, kind, a, b in graded.computing
        ],
    }
