"""After a run: what the plan promised against what came, and corrections for the next plan.

In: a bundle, whose plan.json says what was predicted, the metrics of a run of it, perhaps its trace. Out: a table, and, kept in the user's cache folder,

    corrections   measured over predicted of computations on this machine's processor; the median of the last ones is what `Corrected` multiplies
                  estimates by, for devices that are this machine
    stage times   with a trace: what F, B, W and U of each stage took, which is used wherever the same stage is planned or simulated again

Without a trace computations are taken to be as much off as the step is. The first steps of a run are left out: they warm up caches and fill the pipeline.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from penstock.backends.bundle import Bundle, open_bundle
from penstock.backends.tvm.fingerprint import key_of, processor
from penstock.backends.tvm.store import Store, cache_folder
from penstock.ir.cluster import Device
from penstock.ir.errors import UsageError
from penstock.ir.schedule import COMPUTE, Action
from penstock.measured import Measured, is_here, table_of_user
from penstock.passes.cost import ROOFLINE, InTurn, Prices, rank_seconds
from penstock.passes.kernels import Kernel
from penstock.terminal import say, table

# Corrections that are kept, and steps that are left out at the beginning of a run if it has more than twice as many.
_KEPT, _WARM = 20, 3
_LONGEST = 1e12


@dataclass(frozen=True)
class Corrected:
    """Estimates times what runs on this machine showed them to be off by."""

    factor: float
    runs: int
    prices: Prices = ROOFLINE

    def seconds(self, kernel: Kernel, device: Device) -> float | None:
        found = self.prices.seconds(kernel, device)
        return found * self.factor if found is not None and is_here(device) else found


def corrected(store: Store | None = None) -> Corrected | None:
    """The corrections of this machine, if any were kept."""
    factors = _factors(store if store is not None else known_times())
    return Corrected(median(factors), len(factors)) if factors else None


def known_times() -> Store:
    """What was measured on this machine, to be read: that needs no bound of the cache's size."""
    return Store(cache_folder(), 0, part="times")


def best_prices() -> Prices:
    """All that is known on this machine: times of kernels that were measured, else estimates, corrected by what runs showed."""
    return InTurn((Measured(store=known_times()), corrected() or ROOFLINE))


def _factors(store: Store) -> list[float]:
    content = store.get(_key())
    try:
        found = json.loads(content)["factors"] if content is not None else []
    except (ValueError, KeyError, TypeError):
        return []
    return [x for x in found if isinstance(x, float) and math.isfinite(x) and x > 0] if isinstance(found, list) else []


def _key() -> str:
    """Of plans that are for TVM: others are not what plans estimate."""
    return key_of("corrections", processor())


@dataclass(frozen=True)
class Graded:
    """Seconds per batch; `computing` are (rank, kind of action, predicted, measured), with a trace only. `factor` is what goes into the corrections."""

    predicted: float
    measured: float
    steps: int
    computing: Sequence[tuple[int, str, float, float]]
    factor: float


def grade(bundle: Bundle, metrics: Path, trace: Path | None = None, store: Store | None = None) -> Graded:
    """Compare a run with its plan, and keep what it teaches."""
    store = store if store is not None else table_of_user()
    predicted = bundle.plan.get("predicted", {}).get("step_s")
    if not isinstance(predicted, int | float) or not predicted > 0:
        raise UsageError("the plan of this bundle predicts no step time", where=str(bundle.path), hint="compile it again")
    times = step_times(metrics)
    measured = median(times)
    rows = [] if trace is None else _computing(bundle, trace)
    if rows:
        _keep_stages(bundle, rows, store)
    promised = sum(expected for _, _, expected, _ in rows) if rows else float(predicted)
    came = sum(seconds for *_, seconds in rows) if rows else measured
    # The plan of a bundle has plain estimates, whatever was known where it was made.
    factor = came / promised
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"these times teach nothing: {came:g} s where {promised:g} s were predicted", where=str(trace or metrics))
    cluster = bundle.module.cluster
    # Estimates are of compiled code, so runs of the interpreter teach nothing about them.
    if cluster is not None and any(map(is_here, cluster.devices)) and bundle.manifest.backend == "tvm":
        store.put(_key(), json.dumps({"factors": [*_factors(store), factor][-_KEPT:]}).encode())
    return Graded(predicted, measured, len(times), tuple(rows), factor)


def step_times(metrics: Path) -> list[float]:
    """Seconds of the steps of a metrics file, without the first ones."""
    found: list[float] = []
    try:
        for number, line in enumerate(metrics.read_text(encoding="utf-8").splitlines(), 1):
            found.append(_seconds(json.loads(line)["step_s"], f"line {number}: step_s"))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"cannot read the metrics: {error}", where=str(metrics), hint="give a file that `penstock run --metrics` wrote"
        ) from error
    if not found:
        raise UsageError("has no steps", where=str(metrics))
    return found[_WARM:] if len(found) > 2 * _WARM else found[1:] or found


def _seconds(given: object, what: str) -> float:
    """A time of a file; ValueError for anything else."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not (math.isfinite(given) and 0 <= given <= _LONGEST):
        raise ValueError(f"{what} is {given!r}")
    return float(given)


def _computing(bundle: Bundle, trace: Path) -> list[tuple[int, str, float, float]]:
    """Medians of every kind of computation of every rank, against plain estimates."""
    expected = rank_seconds(bundle.module)
    seen: dict[tuple[int, str], list[float]] = {}
    try:
        for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
            if event.get("ph") == "X":
                action = Action.parse(event["name"])
                seconds = _seconds(event["dur"], f"dur of {action}") * 1e-6
                seen.setdefault((int(event["pid"]), action.kind), []).append(seconds)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"cannot read the trace: {error}", where=str(trace), hint="give a file that `penstock run --trace` wrote"
        ) from error
    strangers = sorted({rank for rank, _ in seen} - {entry.rank for entry in bundle.manifest.ranks})
    if strangers or not seen:
        raise UsageError("is not of a run of this bundle", where=str(trace))
    return [
        (rank, kind, seconds, median(seen[rank, kind]))
        for (rank, kind), seconds in sorted(expected.items(), key=lambda item: (item[0][0], COMPUTE.index(item[0][1])))
        if (rank, kind) in seen
    ]


def _keep_stages(bundle: Bundle, rows: Sequence[tuple[int, str, float, float]], store: Store) -> None:
    """Measured times of stages on devices that are this machine."""
    table_of_times = Measured(bundle.manifest.backend, store)
    cluster = bundle.module.cluster
    for entry in bundle.manifest.ranks:
        own: Mapping[str, float] = {kind: came for rank, kind, _, came in rows if rank == entry.rank}
        if cluster is not None and own and is_here(cluster.device(entry.device)):
            table_of_times.keep_stage(bundle.module, entry.stage, entry.threads, own)


# ------------------------------------------------------------------------------------------------ the command


def grade_command(arguments: Namespace) -> None:
    other = [
        name
        for name in ("batch", "plan", "cluster", "stages", "microbatches", "split_at", "loss", "train", "schedule", "workload")
        if getattr(arguments, name)
    ]
    if other:
        raise UsageError(
            f"{', '.join('--' + name.replace('_', '-') for name in other)} with --grade: it compares a run with the plan of its bundle"
        )
    if not arguments.model or not Path(arguments.model).is_dir():
        raise UsageError("--grade compares a run with the plan of its bundle", hint="penstock plan BUNDLE --grade metrics.jsonl")
    bundle = open_bundle(arguments.model)
    found = grade(bundle, Path(arguments.grade), Path(arguments.trace) if arguments.trace else None)
    if arguments.json:
        print(json.dumps(as_dict(found), indent=2))
        return
    rows = [["step", "", f"{found.predicted * 1e3:.3f} ms", f"{found.measured * 1e3:.3f} ms", f"{found.measured / found.predicted:.2f}"]]
    rows += [[f"rank {rank}", kind, f"{a * 1e3:.3f} ms", f"{b * 1e3:.3f} ms", f"{b / a:.2f}"] for rank, kind, a, b in found.computing]
    print(table(["what", "", "predicted", "measured", "measured / predicted"], rows))
    say(f"{found.steps} steps counted; kept {found.factor:.2f} as a correction for this machine's processor")


def as_dict(found: Graded) -> dict[str, Any]:
    return {
        "predicted_s": found.predicted,
        "measured_s": found.measured,
        "ratio": found.measured / found.predicted,
        "steps": found.steps,
        "correction": found.factor,
        "computing": [{"rank": rank, "kind": kind, "predicted_s": a, "measured_s": b} for rank, kind, a, b in found.computing],
    }
