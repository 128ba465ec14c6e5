"""Train with a bundle from the command line: `penstock run`. In: options. Out: metrics, checkpoints, a summary.

    run_bundle("bundle/", data="train.npz", steps=1000, checkpoint="ckpt/")

starts local workers; where a launcher such as torchrun started this process as one of several, it becomes its rank instead.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ..backends.bundle import open_bundle
from ..ir.rates import Rate
from .hosts import in_group
from .job import Job, data_spec
from .metrics import Metrics
from .options import RunOptions, become_rank
from .program import microbatch_size
from .trace import write_trace


@dataclass(frozen=True)
class RunSummary:
    """What a run did. `losses` are those of its steps; `peak_bytes` the largest resident size of each rank."""

    first_step: int
    losses: list[float]
    seconds: float
    samples_per_second: float
    checkpoint: Path | None
    peak_bytes: list[int]


def run_bundle(
    path: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] = "synthetic",
    steps: int = 10,
    shuffle: bool = False,
    seed: int = 0,
    last: str = "wrap",
    metrics: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
    trace: str | os.PathLike[str] | None = None,
    progress: bool = True,
    lr: float | None = None,
    rate: Rate | str | None = None,
) -> RunSummary:
    """Train for `steps` steps. Where torchrun or srun started this process, it becomes its rank and does not come back."""
    options = RunOptions(
        bundle=os.path.abspath(path),
        data=data_spec(data, shuffle, seed, last),
        steps=steps,
        metrics=_absolute(metrics),
        checkpoint=_absolute(checkpoint),
        resume=_absolute(resume),
        trace=_absolute(trace),
        checkpoint_every=checkpoint_every,
        timeout=timeout,
        progress=progress,
        lr=lr,
        rate=None if rate is None else str(rate),
    )
    options.check()
    if in_group():
        become_rank(options)
    job = Job(open_bundle(path), timeout=timeout, data=options.data, resume=resume, trace=trace is not None, lr=lr, rate=rate)
    with job:
        for warning in job.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        first = job.steps_done
        record = Metrics(
            metrics, microbatch_size(job.module) * job.microbatches, first, first + steps, progress=progress, append=resume is not None
        )
        saved = None
        try:
            record.start()
            for count in options.chunks(first):
                for step in job.steps_from_data(count):
                    record.add(step)
                if checkpoint is not None:
                    saved = job.save(checkpoint)
        finally:
            record.close()
    if trace is not None:
        write_trace(Path(trace), job.traces)
    return RunSummary(first, record.losses, record.seconds, record.samples_per_second, saved, job.peak_bytes)


def _absolute(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.path.abspath(path)
