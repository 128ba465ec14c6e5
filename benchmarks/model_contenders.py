"""The contenders of models.py: one way each to run a model in this process.

In: a `Spec`, the ONNX file of its model, and a batch. Out: contenders that are ready for their first step, and the
reasons of those that are not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from model_specs import Arrays, Spec, feeds_of
from torch_models import build

import penstock as ps
from penstock.backends.registry import backend_of
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import PARAM, Module, signature
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.store import initial_arrays
from penstock.ir.ops import cost_of

COMPUTING = ("matmul", "conv", "conv_grad_input", "conv_grad_weight", "attention", "attention_grad")

Step = Callable[[], np.ndarray]


@dataclass
class Contender:
    """One way to run a model. `step` does the work once and returns the loss before the update, or the results."""

    name: str
    step: Step
    about: dict[str, Any] = field(default_factory=dict)
    results: list[np.ndarray] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    error: float = float("nan")


class NotAvailable(Exception):
    """An exception for a contender that cannot run here, or takes too long to get ready."""


def penstock_contender(spec: Spec, file: Path, feeds: Arrays, folder: Path, threads: int) -> Contender:
    """Prepare one stage on one device of so many threads, to be called in this process as a worker calls it."""
    begin = time.perf_counter()
    training = None if spec.optimizer is None else ps.Training(loss="cross_entropy", optimizer=spec.optimizer)
    model = ps.from_onnx(file)
    cluster = Cluster.local(1)
    cluster = replace(cluster, devices=tuple(replace(device, threads=threads) for device in cluster.devices))
    plan = ps.plan(model, cluster, training, precision=spec.precision)
    planned = time.perf_counter() - begin
    module, backend = plan.module, backend_of("tvm")
    names = backend.compile_stages(module, [0], folder)[0]
    about = {"planned in s": round(planned, 1), "compiled in s": round(time.perf_counter() - begin - planned, 1)}
    program = backend.load_stage(module, 0, [folder / name for name in names], threads)
    graphs = {kind: graph for kind in "FBU" if (graph := module.stage_graph(0, kind)) is not None}
    about["GFLOP"] = sum(cost_of(op).flops for g in graphs.values() for op in g.ops if op.kind in COMPUTING) / 1e9
    buffers = _buffers(module, model.imported.weights)
    slots = {kind: [buffers[slot.var] for slot in signature(graph).slots] for kind, graph in graphs.items()}
    inputs = {name: torch.from_numpy(array) for name, array in feeds.items()}
    if training is None:
        program.hold(graphs["F"].name, slots["F"])

    def step() -> np.ndarray:
        held = dict(inputs)
        for kind, graph in graphs.items():
            results = program.call(graph.name, [*(held[v.name] for v in graph.ins), *slots[kind]])
            held = {**inputs, **dict(zip((v.name for v in graph.results), results, strict=True))} if kind == "F" else {}
            if kind == "F":
                result = held[module.outputs[0]].numpy().copy()
        return result

    return Contender("penstock", step, about)


def _buffers(module: Module, weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Make a tensor for every variable, with its first contents."""
    assert all(var.versions == 1 for var in module.vars.values() if var.role == PARAM)
    arrays = initial_arrays(module, weights, list(module.vars), TYPED)
    return {name: torch.tensor(array) for name, array in arrays.items()}


def torch_contender(spec: Spec, file: Path, feeds: Arrays, compile_limit: float = 0.0) -> Contender:
    """Prepare eager torch, or torch.compile with a limit on the time of its first step; in bf16 by autocast."""
    model = build(spec.kind, spec.sizes, file)
    x, *labels_if_any = (torch.from_numpy(array) for array in feeds.values())

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=spec.is_low):
            return model(x)

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=spec.is_low):
            return F.cross_entropy(model(x), labels)

    if spec.optimizer is None:
        run = torch.compile(forward) if compile_limit else forward
        model.eval()

        def infer() -> np.ndarray:
            with torch.inference_mode():
                return run(x).float().numpy()

        step: Step = infer
    else:
        loss_function = torch.compile(loss_of) if compile_limit else loss_of
        optimizer = torch_optimizer(spec, model)

        def train() -> np.ndarray:
            loss = loss_function(x, *labels_if_any)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach().numpy().copy()

        step = train
    if not compile_limit:
        return Contender("torch", step)
    # A cache of its own: an interrupted run may have left a broken one in the usual place.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(file.parent / "inductor")
    contender = Contender("torch.compile", step)
    begin = time.perf_counter()
    with time_limit(compile_limit):
        try:
            contender.results.append(step())
        except Exception as failure:  # the compiler may raise anything; the table says that it is not available here
            raise NotAvailable(f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}") from failure
    contender.about["first step in s"] = round(time.perf_counter() - begin, 1)
    return contender


def torch_optimizer(spec: Spec, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make torch's fastest form of the same optimiser."""
    o = spec.optimizer
    if isinstance(o, ps.AdamW):
        return torch.optim.AdamW(model.parameters(), o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay, fused=True)
    assert o is not None
    return torch.optim.SGD(model.parameters(), o.lr, o.beta, weight_decay=o.weight_decay, fused=True)


class _TooLong(BaseException):
    """An exception that passes handlers of Exception inside the compiler."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TooLong:
        raise NotAvailable(f"not ready after {seconds:.0f} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def onnxruntime_contender(file: Path, feeds: Arrays, threads: int) -> Contender:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return Contender("onnxruntime", lambda: session.run(None, feeds)[0])


def openvino_contender(file: Path, feeds: Arrays, threads: int) -> Contender:
    """Prepare OpenVINO in float32: on processors with tile registers its default is bfloat16."""
    try:
        import openvino
    except ImportError as missing:
        raise NotAvailable("not installed") from missing
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = openvino.Core().compile_model(str(file), "CPU", settings)
    return Contender("openvino", lambda: model(feeds)[0].copy())


def contenders_of(
    spec: Spec, file: Path, folder: Path, threads: int, compile_limit: float
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that take part, and the reasons of those that do not."""
    feeds = feeds_of(spec)
    contenders = [penstock_contender(spec, file, feeds, folder, threads), torch_contender(spec, file, feeds)]
    absent = {}
    others: dict[str, Callable[[], Contender]] = {}
    if spec.optimizer is None:
        contenders.append(onnxruntime_contender(file, feeds, threads))
        others["openvino"] = lambda: openvino_contender(file, feeds, threads)
    if compile_limit:
        others["torch.compile"] = lambda: torch_contender(spec, file, feeds, compile_limit)
    for name, make in others.items():
        try:
            contenders.append(make())
        except NotAvailable as reason:
            absent[name] = str(reason)
            print(f"{name}: {reason}", file=sys.stderr)
    return contenders, absent
