"""Batches and real runs for the benchmarks of truth.py, with step times and peaks, and the file of results.

A benchmark continues a file that exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from truth_machines import Configuration, place_workers

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import Module
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec

BATCHES, FED = 12, 5
SYNTHETIC = DataSpec()


def batches(module: Module, count: int) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    assert module.schedule is not None
    for _ in range(count):
        batch = {}
        for value in module.data_inputs:
            shape = (value.type.dims[0] * module.schedule.microbatches, *value.type.dims[1:])
            whole = value.type.dtype.startswith("i")
            batch[value.name] = rng.integers(0, 10, shape) if whole else rng.standard_normal(shape).astype(np.float32)
        yield batch


def run(
    configuration: Configuration, bundle: Bundle, groups: Mapping[int, Path], data: DataSpec = SYNTHETIC
) -> list[float]:
    """Return seconds of steps with data that the workers make or read."""
    with Job(bundle, timeout=600, data=data, latency=configuration.latency) as job:
        place_workers(configuration, job.workers.process_ids(), groups)
        list(job.steps_from_data(2))
        ends = [step.at for step in job.steps_from_data(BATCHES)][1:-1]
    return [(b - a) / 2 for a, b in zip(ends, ends[2:], strict=False)]


def memory_of(configuration: Configuration, bundle: Bundle, groups: Mapping[int, Path]) -> list[int]:
    """Return peaks with batches that are sent to the workers, in which some of them wait, as plans count them."""
    with Job(bundle, timeout=600, latency=configuration.latency) as job:
        place_workers(configuration, job.workers.process_ids(), groups)
        list(job.run(batches(bundle.module, FED)))
        return beyond_base(job)


def beyond_base(job: Job) -> list[int]:
    return [peak - base for peak, base in zip(job.peak_bytes, job.base_bytes, strict=True)]


def load(path: Path | None) -> dict[str, Any]:
    if path is not None and path.exists():
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report
    return {"rows": [], "known": {}}


def save(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
