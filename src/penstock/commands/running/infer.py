"""`penstock infer`: a file's samples as requests to an inference bundle.

In: options. Out: a file of outputs, and the speed.

The file is cut into requests of `request` samples (one microbatch by default), which are handed over as fast as the
queue takes them: that measures throughput. A request's latency is the time from its handing over until its outputs are
there. In throughput mode that is mostly waiting behind other requests; in latency mode each is handed over when the one
before it is answered. Loading is no part of either.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.arguments import add_settings, settings_from
from penstock.support.atomic_files import naming, replacing
from penstock.support.errors import UsageError
from penstock.support.paths import replacing_problem
from penstock.support.settings import POSITIVE, SEED, required, setting
from penstock.support.terminal import StatusLine, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    import numpy as np

    from penstock.ir.graph import Module
    from penstock.runtime.job.inference import Inference
    from penstock.runtime.job.job import Job
    from penstock.runtime.messages.control import Arrays

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class InferOptions:
    """Settings of answering requests. `samples` are for synthetic data; None means as many as fill 64 microbatches."""

    bundle: str
    data: str = required(
        "one array per input, any number of samples along the first axis; synthetic: seeded noise, to measure",
        flags=("--data", "--input"),
        shown="X.npz|synthetic",
    )
    output: str | None = setting(None, "one array per output", shown="Y.npz")
    mode: str = setting(
        "throughput",
        "throughput: many requests at once, which share microbatches; latency: one at a time (default: throughput)",
        choices=("throughput", "latency"),
    )
    request: int | None = setting(
        None, "samples per request (default: those of a microbatch)", check=POSITIVE, shown="N"
    )
    samples: int | None = setting(
        None, "with --data synthetic: how many (default: 64 microbatches)", check=POSITIVE, shown="N"
    )
    seed: int = setting(0, "of --data synthetic (default: 0)", check=SEED, shown="N")
    json: bool = setting(False, "print throughput and percentiles of latency as one JSON object")
    timeout: float = setting(
        60.0, "give up when a peer keeps a rank waiting this long (default: 60)", read=float, shown="S"
    )

    def check(self) -> None:
        """Raise UsageError where the work would be for nothing."""
        problems = []
        # Checked before the work, not when it is done.
        if self.output is not None and (problem := replacing_problem(os.path.abspath(self.output))):
            problems.append(f"cannot write the outputs to {self.output}: {problem}")
        if self.samples is not None and self.data != "synthetic":
            problems.append("--samples is for --data synthetic: a file has as many as it has")
        if self.output is None and self.data != "synthetic" and not self.json:
            problems.append("nobody would get the outputs: add --output, or --json to measure only")
        if problems:
            raise UsageError("; ".join(problems), where="infer")


@dataclass(frozen=True)
class InferReport:
    """The time that requests took; latencies in seconds."""

    mode: str
    requests: int
    samples: int
    samples_per_request: int
    microbatch: int
    seconds: float
    samples_per_s: float
    latency_s: dict[str, float]

    def text(self) -> str:
        latencies = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in self.latency_s.items())
        return (
            f"{self.requests} requests of {self.samples_per_request} samples ({self.mode}): {self.samples} samples in "
            f"{self.seconds:.2f} s, {self.samples_per_s:.1f} samples/s\nlatency {latencies}"
        )


def add_arguments(parser: ArgumentParser) -> None:
    """Add the bundle, and settings."""
    parser.add_argument("bundle", metavar="BUNDLE")
    add_settings(parser, InferOptions)


def run(arguments: Namespace) -> None:
    """Answer the requests of a file, and report the speed."""
    infer(settings_from(InferOptions, arguments, bundle=arguments.bundle))


def infer(options: InferOptions) -> InferReport:
    """Answer all requests, and write their outputs."""
    from penstock.ir.batch_shares import microbatch_size  # lazy: heavy
    from penstock.runtime.data.files import read_npz  # lazy: heavy
    from penstock.runtime.generation.facts import generates  # lazy: heavy
    from penstock.runtime.job.job import open as open_job  # lazy: heavy

    options.check()
    if generates(Path(options.bundle)):
        raise UsageError("the bundle generates text", where=options.bundle, hint="use `penstock generate`")
    inputs = None if options.data == "synthetic" else read_npz(Path(options.data))
    with open_job(options.bundle, timeout=options.timeout, mode=options.mode) as job:
        if inputs is None:
            inputs = synthetic(job.module, options.samples or 64 * microbatch_size(job.module), options.seed)
        size = options.request or microbatch_size(job.module)
        outputs, report = answer(job, inputs, size, options.mode, where=options.data, keep=options.output is not None)
    if options.output is not None:
        _write(Path(options.output), outputs)
        for name, array in outputs.items():
            say(f"{name}: {array.dtype} {list(array.shape)}")
    say(report.text())
    if options.json:
        print(json.dumps(asdict(report)))
    return report


def synthetic(module: Module, samples: int, seed: int) -> Arrays:
    """Return seeded noise of the right types."""
    import numpy as np  # lazy: heavy

    from penstock.ir.batch_shares import microbatch_size, sample_rows  # lazy: heavy
    from penstock.runtime.data.samples import SyntheticSamples  # lazy: heavy

    source, size, places = SyntheticSamples(module, seed), microbatch_size(module), sample_rows(module)
    arrays: Arrays = {}
    for value in module.data_inputs:
        place = places.get(value.name)
        pieces = [source.microbatch(mb, value.name) for mb in range(1 if place is None else -(-samples // size))]
        arrays[value.name] = pieces[0] if place is None else place.part(np.concatenate(pieces, place.axis), 0, samples)
    return arrays


def answer(
    job: Job, inputs: Arrays, size: int, mode: str, *, where: str = "inputs", keep: bool = True
) -> tuple[Arrays, InferReport]:
    """Answer all samples as requests of up to `size` samples; return their outputs one after the other, where the
    caller keeps them."""
    inference = job.inference
    if inference is None:
        raise UsageError(
            "the bundle is for training",
            where=str(job.bundle.path),
            hint="compile the model without a loss for inference",
        )
    samples, parts, send, axes = _requests(inference, inputs, size, where)
    requests = len(parts) if isinstance(parts, list) else -(-samples // size)
    # In latency mode no request waits behind another one.
    window = 1 if mode == "latency" else max(inference.queue, 4 * len(job.module.stages))
    line = StatusLine(rewrite_every=0.1)
    pending: deque[tuple[float, Future[Arrays]]] = deque()
    answered: list[float] = []
    pieces: list[Arrays] = []
    latencies: list[float] = []

    def note(future: Future[Arrays], handed: float) -> None:
        latencies.append(time.monotonic() - handed)

    def collect() -> None:
        outputs = pending.popleft()[1].result()
        answered.append(time.monotonic())
        if keep:
            pieces.append(outputs)
        if line.due or len(answered) == requests:
            done = min(len(answered) * size, samples)
            line.show(f"sample {done}/{samples}  {done / max(answered[-1] - started, 1e-9):.1f} samples/s")

    started = time.monotonic()
    try:
        for request in parts:
            while len(pending) >= window:
                collect()
            handed = time.monotonic()
            future = send(request)
            future.add_done_callback(lambda f, handed=handed: note(f, handed))  # type: ignore[misc]
            pending.append((handed, future))
        while pending:
            collect()
    finally:
        line.close()
    seconds = answered[-1] - started
    report = InferReport(
        mode,
        requests,
        samples,
        size,
        inference.layout.samples,
        seconds,
        samples / max(seconds, 1e-9),
        _percentiles(latencies),
    )
    names = pieces[0] if pieces else {}
    return {name: _joined([p[name] for p in pieces], axes.get(name, 0)) for name in names}, report


def _requests(
    inference: Inference, inputs: Arrays, size: int, where: str
) -> tuple[int, Iterable[Any], Callable[[Any], Future[Arrays]], Mapping[str, int]]:
    """Return the number of samples, requests of up to `size` of them, what sends one, and the dimensions along which
    outputs are joined."""
    from penstock.runtime.job.sized_inference import SizedInference  # lazy: heavy

    if isinstance(inference, SizedInference):
        samples, sized = inference.parts(inputs, size, where)
        return samples, sized, lambda request: inference.submit(request, None), inference.sized.output_axes
    whole = inference.layout.request(inputs, where)
    parts = inference.layout.cut(whole, size)
    return whole.samples, parts, lambda request: inference.send([request])[0], inference.layout.output_axes


def _percentiles(latencies: list[float]) -> dict[str, float]:
    import numpy as np  # lazy: heavy

    return {f"p{p}": float(np.percentile(latencies, p)) for p in PERCENTILES} | {"max": max(latencies)}


def _joined(pieces: list[np.ndarray], axis: int) -> np.ndarray:
    import numpy as np  # lazy: heavy

    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)


def _write(path: Path, outputs: Arrays) -> None:
    from penstock.runtime.data.files import write_npz  # lazy: heavy

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a pipe has its reader, who waits for it
        with naming(path), path.open("wb") as file:
            write_npz(file, outputs)
        return
    with replacing(path) as work, work.open("wb") as file:
        write_npz(file, outputs)
