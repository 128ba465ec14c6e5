"""The grade of a plan: its predictions against the times of a run, and corrections for the next plan.

In: a bundle, whose plan.json says what was predicted, the metrics of a run of it, perhaps its trace. Out: a `Graded`,
and, kept in the user's cache folder,

    corrections   measured over predicted of the work that kernels do on this machine's processor (corrections.py)
    stage times   with a trace: what F, B, W and U of each stage took, which is used wherever the same stage is planned
                  or simulated again

With a trace the work is what computations took beside launches and calls. Without one it is what the simulator needs to
come to the measured step, all else being as predicted. A run says nothing of the work where the rest alone makes more
than half of what was predicted or measured; then no correction is kept. A factor that is far from 1 is reported, and
not kept: it is of a run that was disturbed, or of a cluster file that is not of this machine. The first steps of a run
are left out: they warm up caches and fill the pipeline. A run counts once: a second grade of it replaces the first.

Limits: without a trace links that are slower than the cluster file says are taken for slow computing, as far as they
are in the way.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from penstock.backends.bundle.format import Bundle
from penstock.ir.batch_shares import microbatch_size
from penstock.ir.schedule import COMPUTE, Action
from penstock.passes.costs.prices import Roofline, rank_seconds, timed_kind
from penstock.passes.simulator.forecast import BATCHES, forecast, seconds_of
from penstock.support.cache import Cache
from penstock.support.errors import UsageError

from .corrections import keep
from .measured import Measured, is_here, table_of_user

# Steps that are left out at the beginning of a run if it has more than twice as many.
_WARM = 3
_LONGEST = 1e12
# Factors that a correction may have.
PLAUSIBLE = (0.1, 10.0)
# The precision of the search for a factor.
_CLOSE = 1e-3
# Rank, kind of action, predicted and measured seconds.
Row = tuple[int, str, float, float]


def _run(bundle: Bundle, metrics: Path) -> str:
    """Name a run by its bundle and its metrics, wherever they lie."""
    return hashlib.sha256(
        f"{bundle.module_hash} {hashlib.sha256(metrics.read_bytes()).hexdigest()}".encode()
    ).hexdigest()


@dataclass(frozen=True)
class Graded:
    """The seconds per batch, predicted and measured. `computing` are (rank, kind of action, predicted, measured), with
    a trace only. `factor` is what work took over what was predicted, None where the run does not say; `kept` whether it
    went into the corrections."""

    predicted: float
    measured: float
    steps: int
    computing: Sequence[Row]
    factor: float | None
    kept: bool


def grade(bundle: Bundle, metrics: Path, trace: Path | None = None, store: Cache | None = None) -> Graded:
    """Compare a run with its plan, and keep what it teaches."""
    store = store if store is not None else table_of_user()
    predicted = bundle.plan.get("predicted", {}).get("step_s")
    if not isinstance(predicted, int | float) or not predicted > 0:
        raise UsageError(
            "the plan of this bundle predicts no step time", where=str(bundle.path), hint="compile it again"
        )
    times = step_times(metrics, _samples(bundle))
    measured = median(times)
    rows = [] if trace is None else _computing(bundle, trace)
    if rows:
        _keep_stages(bundle, rows, store)
    factor = _from_computing(bundle, rows) if rows else _from_step(bundle, measured)
    # Estimates are of compiled code, so runs of the interpreter teach nothing about them.
    is_plausible = factor is not None and bundle.manifest.backend == "tvm" and PLAUSIBLE[0] <= factor <= PLAUSIBLE[1]
    if factor is not None and is_plausible:
        keep(store, _run(bundle, metrics), factor)
    return Graded(predicted, measured, len(times), tuple(rows), factor, is_plausible)


def _promised(bundle: Bundle) -> tuple[dict[tuple[int, str], float], dict[tuple[int, str], float]]:
    """Return plain estimates by rank and kind, as in the plan of a bundle, whatever was known where it was made; and
    those parts of them that are no work of this machine."""
    return rank_seconds(bundle.module), rank_seconds(
        bundle.module, Roofline(lambda device: 0.0 if is_here(device) else 1.0)
    )


def _from_computing(bundle: Bundle, rows: Sequence[Row]) -> float | None:
    """Return measured over predicted work, of all computations on this machine."""
    cluster = bundle.module.cluster
    assert cluster is not None
    local_ranks = {entry.rank for entry in bundle.manifest.ranks if is_here(cluster.device(entry.device))}
    local = [row for row in rows if row[0] in local_ranks]
    _, beside = _promised(bundle)
    beside_work = sum(beside[rank, kind] for rank, kind, *_ in local)
    promised, measured = sum(row[2] for row in local), sum(row[3] for row in local)
    return (
        (measured - beside_work) / (promised - beside_work) if _says_enough(beside_work, promised, measured) else None
    )


def _from_step(bundle: Bundle, measured: float) -> float | None:
    """Return the factor of the predicted work that makes the simulated step as long as the measured one."""
    plain, beside = _promised(bundle)

    def step(factor: float) -> float:
        times = {key: beside[key] + factor * (seconds - beside[key]) for key, seconds in plain.items()}
        return forecast(bundle.module, seconds_of(bundle.module, times), BATCHES).step

    beside_work, promised = step(0.0), step(1.0)
    if not _says_enough(beside_work, promised, measured):
        return None
    # A step takes at most `factor` times as long. It takes at least as long as the other work plus `factor` times this
    # work. For factors below 1 it is the other way round.
    low, high = sorted((measured / promised, (measured - beside_work) / (promised - beside_work)))
    while high > low * (1 + _CLOSE):
        middle = (low + high) / 2
        low, high = (middle, high) if step(middle) < measured else (low, middle)
    return (low + high) / 2


def _says_enough(beside_work: float, promised: float, measured: float) -> bool:
    """Return whether work makes half of it: with less, the factor would be that of something else."""
    return 2 * beside_work <= min(promised, measured) > 0


def _samples(bundle: Bundle) -> int:
    """Return the samples of a batch."""
    schedule = bundle.module.schedule
    assert schedule is not None
    return microbatch_size(bundle.module) * schedule.microbatches


def step_times(metrics: Path, samples: int | None = None) -> list[float]:
    """Read the seconds of the steps of a metrics file, of so many samples each, without the first ones."""
    strange: object = None
    times: list[float] = []
    try:
        for number, line in enumerate(metrics.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            if not {"eval_loss", "hidden"} & row.keys():  # an evaluation is no step, nor is the hidden part of messages
                times.append(_seconds(row["step_s"], f"line {number}: step_s"))
                if samples is not None and row.get("samples", samples) != samples:
                    strange = row["samples"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"cannot read the metrics: {error}",
            where=str(metrics),
            hint="give a file that `penstock run --metrics` wrote",
        ) from error
    if not times:
        raise UsageError("has no steps", where=str(metrics))
    if strange is not None:
        raise UsageError(
            f"is not of a run of this bundle: its steps have {strange} samples, those of the plan {samples}",
            where=str(metrics),
        )
    return times[_WARM:] if len(times) > 2 * _WARM else times[1:] or times


def _seconds(given: object, what: str) -> float:
    """Read a time of a file; ValueError for anything else."""
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or not (math.isfinite(given) and 0 <= given <= _LONGEST)
    ):
        raise ValueError(f"{what} is {given!r}")
    return float(given)


def _computing(bundle: Bundle, trace: Path) -> list[Row]:
    """Return medians of every kind of computation of every rank, against plain estimates."""
    expected = rank_seconds(bundle.module)
    seen: dict[tuple[int, str], list[float]] = {}
    try:
        for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
            if event.get("ph") == "X":
                action = Action.parse(event["name"])
                seconds = _seconds(event["dur"], f"dur of {action}") * 1e-6
                kind = timed_kind(bundle.module, action.stage, action.kind)
                seen.setdefault((int(event["pid"]), kind), []).append(seconds)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"cannot read the trace: {error}", where=str(trace), hint="give a file that `penstock run --trace` wrote"
        ) from error
    strangers = sorted({rank for rank, _ in seen} - {entry.rank for entry in bundle.manifest.ranks})
    if strangers or not seen:
        raise UsageError("is not of a run of this bundle", where=str(trace))
    return [
        (rank, kind, seconds, median(seen[rank, kind]))
        for (rank, kind), seconds in sorted(expected.items(), key=lambda item: _order(*item[0]))
        if (rank, kind) in seen
    ]


def _order(rank: int, kind: str) -> tuple[int, int, int]:
    """Return the place of a computation in the table: by rank, by stage where ranks run several, and by kind."""
    letter = kind.lstrip("0123456789")
    return rank, int(kind.removesuffix(letter) or 0), COMPUTE.index(letter)


def _keep_stages(bundle: Bundle, rows: Sequence[Row], store: Cache) -> None:
    """Store measured times of stages on devices that are this machine. Of ranks that run the same code with as many
    threads, it is the median."""
    table_of_times = Measured(bundle.manifest.backend, store)
    cluster = bundle.module.cluster
    assert cluster is not None
    seen: dict[tuple[int, int], dict[str, list[float]]] = {}
    for entry in bundle.manifest.ranks:
        if is_here(cluster.device(entry.device)):
            times = {kind: seconds for rank, kind, _, seconds in rows if rank == entry.rank}
            for stage, kind in product(entry.stages, COMPUTE):
                if (name := timed_kind(bundle.module, stage, kind)) in times:
                    seen.setdefault((stage, entry.threads), {}).setdefault(kind, []).append(times[name])
    for (stage, threads), by_kind in seen.items():
        table_of_times.keep_stage(
            bundle.module, stage, threads, {kind: median(times) for kind, times in by_kind.items()}
        )
