"""The cost of a delay of one update, measured by training.

It is the difference of the final losses of the same training under 1f1b, which is plain training, and under 2bw.

In: a model for every seed, optimisers by the names of their rows, data. Every run uses real stages, so that the
comparison is of what users get; both schedules see the same samples in the same order from the same weights. Out: for
every optimiser the final loss, the mean over the last steps (a tenth of them), for each seed and schedule; the gap of
each seed, 2bw less 1f1b; its mean and standard deviation over the seeds. The deviation of 1f1b's own final losses is
the effect of another seed: a gap within it cannot be seen in one run.

A loss that is not finite at the end is a run that has diverged: its gap is reported, too. Limits: a model from a file
has the same weights for every seed, which then only seeds dropout and the order of samples; few seeds give a coarse
deviation.
"""

from __future__ import annotations

import math
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.ir.cluster.cluster import Cluster
from penstock.planning.options import BuildOptions, PlanOptions
from penstock.support.errors import UsageError
from penstock.support.terminal import say, table
from penstock.support.words import counted

if TYPE_CHECKING:
    from penstock.ir.training.optimizers import Optimizer
    from penstock.planning.model import Model

PLAIN, DELAYED = "1f1b", "2bw"
# The final loss is the mean of the last 1/TAIL of the steps.
TAIL = 10


@dataclass(frozen=True)
class ParitySetting:
    """The settings of all runs. `data` is a file for `penstock run --data`, or `synthetic`."""

    loss: str
    data: str = "synthetic"
    steps: int = 200
    microbatches: int = 4
    devices: int = 2
    precision: str = "f32"
    backend: str = "tvm"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.devices < 2:
            raise UsageError(
                f"one device has no pipeline to compare, got {self.devices}", where="parity", hint="--devices 2 or more"
            )


@dataclass(frozen=True)
class Parity:
    """The final losses of one optimiser: one of every seed under each schedule."""

    name: str
    plain: tuple[float, ...]
    delayed: tuple[float, ...]
    losses: Mapping[tuple[str, int], Sequence[float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.plain, self.delayed, strict=True))

    @property
    def gap(self) -> float:
        return statistics.fmean(self.gaps)

    @property
    def deviation(self) -> float:
        return spread(self.gaps)

    def as_dict(self) -> dict[str, object]:
        return {
            "optimizer": self.name,
            PLAIN: list(self.plain),
            DELAYED: list(self.delayed),
            "gaps": list(self.gaps),
            "gap": self.gap,
            "deviation": self.deviation,
        }


def spread(numbers: Sequence[float]) -> float:
    """Return the standard deviation of a sample; nan where there is one number, or one that is not finite."""
    return statistics.stdev(numbers) if len(numbers) > 1 and all(map(math.isfinite, numbers)) else math.nan


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean over the last tenth of the steps."""
    return statistics.fmean(losses[-max(1, len(losses) // TAIL) :])


def compare(
    models: Callable[[int], Model], optimizers: Mapping[str, Optimizer], setting: ParitySetting, seeds: Sequence[int]
) -> list[Parity]:
    """Train once per optimiser, seed and schedule; `models` returns the model of a seed."""
    by_seed = {seed: models(seed) for seed in seeds}
    parities = []
    for name, optimizer in optimizers.items():
        losses: dict[tuple[str, int], Sequence[float]] = {}
        for seed, model in by_seed.items():
            for schedule in (PLAIN, DELAYED):
                losses[schedule, seed] = train(model, optimizer, schedule, setting, seed)
                say(
                    f"{name}, seed {seed}, {schedule}: {losses[schedule, seed][0]:.4f} at first, "
                    f"{final_loss(losses[schedule, seed]):.4f} at the end"
                )
        ends = {schedule: tuple(final_loss(losses[schedule, seed]) for seed in seeds) for schedule in (PLAIN, DELAYED)}
        parities.append(Parity(name, ends[PLAIN], ends[DELAYED], losses))
    return parities


def train(model: Model, optimizer: Optimizer, schedule: str, setting: ParitySetting, seed: int) -> list[float]:
    """Return the loss of every step of one run."""
    from penstock.frontends.training import Training  # lazy: heavy
    from penstock.planning.build import build  # lazy: heavy
    from penstock.planning.pipeline import plan_model  # lazy: heavy
    from penstock.runtime.job.job import open as open_job  # lazy: heavy

    training = Training(setting.loss, optimizer, setting.microbatches, precision=setting.precision, seed=seed)
    options = PlanOptions(schedule=schedule, stages=setting.devices)
    plan = plan_model(model, Cluster.local(setting.devices), training, options)
    with tempfile.TemporaryDirectory(prefix="penstock-parity-") as folder:
        bundle = build(plan, Path(folder) / "bundle", BuildOptions(setting.backend))
        shuffled = setting.data != "synthetic"
        with open_job(bundle, timeout=setting.timeout, data=setting.data, shuffle=shuffled, seed=seed) as job:
            return [step.loss for step in job.steps_from_data(setting.steps)]


HEADER = (
    "optimiser",
    f"final loss, {PLAIN}",
    f"final loss, {DELAYED}",
    "gap of each seed",
    "gap",
    "its deviation",
    f"deviation of {PLAIN}",
)


def report(rows: Sequence[Parity]) -> list[list[str]]:
    """Return one line per optimiser, below `HEADER`."""
    return [
        [
            row.name,
            f"{statistics.fmean(row.plain):.4f}",
            f"{statistics.fmean(row.delayed):.4f}",
            " ".join(f"{gap:+.4f}" for gap in row.gaps),
            f"{row.gap:+.4f}",
            _deviation(row.deviation),
            _deviation(spread(row.plain)),
        ]
        for row in rows
    ]


def _deviation(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.4f}"


def verify_parity(
    models: Callable[[int], Model], optimizers: Mapping[str, Optimizer], setting: ParitySetting, seeds: int
) -> int:
    """Run the command: train, and print the table. A gap is no failure: the user judges whether it matters."""
    rows = compare(models, optimizers, setting, range(seeds))
    print(table(list(HEADER), report(rows)))
    last = max(1, setting.steps // TAIL)
    print(
        f"{counted(setting.steps, 'step')} of {counted(setting.microbatches, 'microbatch')} on "
        f"{setting.devices} stages; "
        f"a final loss is the mean of the last {last} steps; a gap is {DELAYED} less {PLAIN}"
    )
    return 0


def optimizers_of(words: str) -> dict[str, Optimizer]:
    """Parse `momentum:0.05,adamw`: optimisers by kind, each with its learning rate if not the default."""
    from penstock.ir.training.optimizers import optimizer_of  # lazy: heavy

    optimizers: dict[str, Optimizer] = {}
    # A comma between braces separates settings.
    for word in filter(None, (part.strip() for part in re.split(r",(?![^{]*\})", words))):
        kind, colon, rate = word.partition(":")
        try:
            optimizers[word] = optimizer_of(kind, **({"lr": float(rate)} if colon else {}))
        except ValueError as error:
            raise UsageError(
                f"bad learning rate {rate!r}", where=f"--optimizers {word}", hint="KIND or KIND:RATE, e.g. adamw:1e-3"
            ) from error
    if not optimizers:
        raise UsageError("names no optimiser", where="--optimizers")
    return optimizers
