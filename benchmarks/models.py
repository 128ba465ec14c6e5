"""Whole models in one process, from the same ONNX files: Penstock, torch, torch.compile, onnxruntime and OpenVINO.

    python benchmarks/models.py                            all models on one thread: ten minutes, 8 GB of memory
    python benchmarks/models.py --only infer --threads 2   inference on two cores
    python benchmarks/models.py --models resnet50-infer --rounds 21 --json models.json
    python benchmarks/models.py --precision bf16           Penstock's bf16 against torch's autocast
    python benchmarks/models.py --tiny                     the same models in small: what the tests run

    resnet50-train    a step of SGD with momentum on 8 images of 3x224x224, 1000 classes
    bert-base-train   a step of AdamW on 8 sequences of 128 tokens: the encoder with a classification head
    NAME-infer        gpt2-small (all logits of 128 positions), bert-base (128 positions), resnet50, and cnn (five 3x3
                      convolutions of up to 512 channels, each with pooling, on 224x224): one sample; mlp (four layers
                      up to 4096 wide): 32 samples

Batch norms use their stored statistics in training, at every contender, because that is what Penstock does: their
scales and offsets are trained, their means and variances are not. Sequences are full, without a mask.

Everything runs in one process, a step of each contender in turn, the first one changing. Times are medians of processor
time of the process; with several threads, of wall time. Training starts from the weights in the file, the same batch
again and again. Losses of all contenders must agree with those of eager torch, step by step, and fall. Results of
inference are compared with torch in float64. Numbers that disagree are an error: exit code 1. OpenVINO takes part in
inference where it is installed (`pip install '.[bench]'`). README.md says more.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import load, markdown, processor, system, versions, write_json
from peak import rate_of_cores, register_loop
from torch_models import build
from turns import in_turn

import penstock as ps
from penstock import models as files
from penstock.backends.registry import backend_of
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import PARAM, Module, signature
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.store import initial_arrays
from penstock.ir.ops import cost_of

# Losses after a few updates against eager torch's, relative to the first; results, relative to the largest of float64.
LOSS_TOLERANCE, RESULT_TOLERANCE = 1e-4, 2e-5
# Losses must fall by this many times the tolerance while they are compared, or agreement would say nothing about
# gradients.
LEAST_FALL = 30
# The same in bf16, whose unit roundoff is 4e-3: contenders round at other places, so this finds gross errors only.
LOW_LOSS_TOLERANCE, LOW_RESULT_TOLERANCE = 1e-2, 1e-1
CHECKED_STEPS = 4
COMPUTING = ("matmul", "conv", "conv_grad_input", "conv_grad_weight", "attention", "attention_grad")

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Spec:
    """A row: a model, its sizes, and its use. `unit` is what is counted, `units` the number of them in a sample."""

    kind: str
    sizes: Mapping[str, Any]
    batch: int
    unit: str
    units: int
    optimizer: ps.AdamW | ps.Momentum | None = None
    size: int = 0
    precision: str = "f32"

    @property
    def is_low(self) -> bool:
        return self.precision != "f32"


SGD = ps.Momentum(lr=1e-3, beta=0.9, weight_decay=1e-4)
ADAMW = ps.AdamW(lr=1e-5, weight_decay=0.01)
_RESNET = {"blocks": (3, 4, 6, 3), "width": 64, "classes": 1000}
_BERT = {"layers": 12, "width": 768, "heads": 12, "vocab": 30522, "positions": 128, "classes": 2}
_GPT = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "positions": 128}
SPECS = {
    "resnet50-train": Spec("resnet", _RESNET, 8, "images", 1, SGD, 224),
    "bert-base-train": Spec("bert", _BERT, 8, "tokens", 128, ADAMW),
    "gpt2-small-infer": Spec("gpt", _GPT, 1, "tokens", 128),
    "bert-base-infer": Spec("bert", _BERT, 1, "tokens", 128),
    "resnet50-infer": Spec("resnet", _RESNET, 1, "images", 1, None, 224),
    "cnn-infer": Spec("cnn", {"channels": (3, 64, 128, 256, 512, 512), "size": 224, "classes": 1000}, 1, "images", 1),
    "mlp-infer": Spec("mlp", {"sizes": (1024, 4096, 4096, 4096, 1000)}, 32, "samples", 1),
}
_SMALL = {
    "resnet": {"blocks": (1, 1), "width": 8, "classes": 10},
    "bert": {"layers": 2, "width": 32, "heads": 2, "vocab": 50, "positions": 16, "classes": 2},
    "gpt": {"layers": 2, "width": 32, "heads": 2, "vocab": 50, "positions": 16},
    "cnn": {"channels": (3, 8, 16), "size": 16, "classes": 10},
    "mlp": {"sizes": (16, 32, 32, 10)},
}


def small(spec: Spec) -> Spec:
    """Shrink a row to a size that takes seconds. Few parameters need larger steps before their losses fall."""
    faster = {ps.Momentum: ps.Momentum(lr=1e-2), ps.AdamW: ps.AdamW(lr=1e-3)}
    units = 16 if spec.unit == "tokens" else 1
    optimizer = faster[type(spec.optimizer)] if spec.optimizer else None
    return Spec(spec.kind, _SMALL[spec.kind], min(spec.batch, 2), spec.unit, units, optimizer, 32 if spec.size else 0)


def write_model(spec: Spec, path: Path, seed: int = 0) -> Path:
    sizes: dict[str, Any] = dict(spec.sizes) | ({"size": spec.size} if spec.size else {})
    writer: Callable[..., Path] = getattr(files, f"write_{spec.kind}")
    return writer(path, batch=spec.batch, seed=seed, **sizes)


def feeds_of(spec: Spec) -> Arrays:
    """Make one batch: the model's input, and labels for training."""
    random = np.random.default_rng(1)
    if spec.kind == "resnet":
        feeds = {"x": random.standard_normal((spec.batch, 3, spec.size, spec.size), np.float32)}
    elif spec.kind == "cnn":
        feeds = {
            "x": random.standard_normal((spec.batch, spec.sizes["channels"][0], *[spec.sizes["size"]] * 2), np.float32)
        }
    elif spec.kind == "mlp":
        feeds = {"x": random.standard_normal((spec.batch, spec.sizes["sizes"][0]), np.float32)}
    else:
        feeds = {"tokens": random.integers(0, spec.sizes["vocab"], (spec.batch, spec.sizes["positions"]))}
    if spec.optimizer is not None:
        feeds["labels"] = random.integers(0, spec.sizes["classes"], spec.batch)
    return feeds


# ------------------------------------------------------------------------------------------------ contenders

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
        optimizer = _torch_optimizer(spec, model)

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


def _torch_optimizer(spec: Spec, model: torch.nn.Module) -> torch.optim.Optimizer:
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


# ------------------------------------------------------------------------------------------------ checking


def warm_up(spec: Spec, contenders: Sequence[Contender], file: Path) -> list[str]:
    """Run the first steps of all contenders, and return everything that is wrong with their numbers."""
    steps = CHECKED_STEPS if spec.optimizer is not None else 1
    for contender in contenders:
        while len(contender.results) < steps:
            contender.results.append(contender.step())
    if spec.optimizer is None:
        x = next(torch.from_numpy(array) for array in feeds_of(spec).values())
        model = build(spec.kind, spec.sizes, file).double().eval()
        with torch.inference_mode():
            exact = model(x.double() if x.is_floating_point() else x).numpy()
        tolerance = LOW_RESULT_TOLERANCE if spec.is_low else RESULT_TOLERANCE
        for contender in contenders:
            contender.error = float(np.abs(contender.results[0] - exact).max() / np.abs(exact).max())
    else:
        expected = np.array(next(c for c in contenders if c.name == "torch").results)
        tolerance = LOW_LOSS_TOLERANCE if spec.is_low else LOSS_TOLERANCE
        if not expected[-1] < expected[0] * (1 - LEAST_FALL * LOSS_TOLERANCE):
            return [f"losses do not fall: {expected.tolist()}"]
        for contender in contenders:
            contender.error = float(np.abs(np.array(contender.results) - expected).max() / expected[0])
    return [
        f"{c.name} is off by {c.error:.1e}, more than {tolerance:g}" for c in contenders if not c.error <= tolerance
    ]


# ------------------------------------------------------------------------------------------------ measuring


def take_turns(contenders: Sequence[Contender], steps: int, rounds: int) -> None:
    for _, contender in in_turn(contenders, rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            contender.step()
        contender.cpu_s.append((time.process_time() - cpu) / steps)
        contender.wall_s.append((time.perf_counter() - wall) / steps)


def measure(name: str, spec: Spec, folder: Path, arguments: argparse.Namespace, cores: Sequence[int]) -> dict[str, Any]:
    """Measure one row of the report."""
    begin = time.perf_counter()
    file = write_model(spec, folder / f"{name}.onnx")
    contenders, absent = contenders_of(spec, file, folder, arguments.threads, arguments.compile_limit)
    wrong = warm_up(spec, contenders, file)
    print(f"{name}: ready in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    with pinned(cores):
        take_turns(contenders, arguments.steps, arguments.rounds)
    row = {
        "model": name,
        "unit": spec.unit,
        "per_step": spec.batch * spec.units,
        "optimizer": type(spec.optimizer).__name__ if spec.optimizer else None,
        "gflop": contenders[0].about["GFLOP"],
        "absent": absent,
        "wrong": wrong,
        "contenders": {
            c.name: {
                "turn_s": c.cpu_s if len(cores) == 1 else c.wall_s,
                "wall_s": c.wall_s,
                "error": c.error,
                "about": c.about,
                **({"losses": [float(x) for x in c.results]} if spec.optimizer else {}),
            }
            for c in contenders
        },
    }
    times = (f"{name} {time_of(side) * 1e3:.1f} ms" for name, side in row["contenders"].items())
    print(f"{name}: " + "; ".join([*times, *wrong]), file=sys.stderr)
    return row


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Bind this thread, and those that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ------------------------------------------------------------------------------------------------ reporting


def table(rows: Sequence[Mapping[str, Any]], peak: float) -> str:
    """Write the table in Markdown. A ratio above 1 means that Penstock is faster."""
    heads = [
        "model",
        "unit/s",
        "Penstock",
        "of peak",
        "error",
        "contender",
        "its rate",
        "ratio",
        "slowest to fastest turn",
        "its error",
    ]
    lines = []
    for row in rows:
        ours = row["contenders"]["penstock"]
        mine = time_of(ours)
        share = f"{100 * row['gflop'] * 1e9 / mine / peak:.0f} %" if peak else "-"
        cells = [row["model"], row["unit"], f"{row['per_step'] / mine:.1f}", share, f"{ours['error']:.1e}"]
        for name, other in row["contenders"].items():
            if name != "penstock":
                turns = [theirs / our_turn for theirs, our_turn in zip(other["turn_s"], ours["turn_s"], strict=True)]
                spread = f"{min(turns):.2f} to {max(turns):.2f}"
                more = [
                    name,
                    f"{row['per_step'] / time_of(other):.1f}",
                    f"{time_of(other) / mine:.3f}",
                    spread,
                    f"{other['error']:.1e}",
                ]
                lines.append(cells + more)
                cells = [""] * 5
        lines += [["", "", "", "", "", name, "-", "-", reason, ""] for name, reason in row["absent"].items()]
    return markdown(heads, lines)


def time_of(side: Mapping[str, Any]) -> float:
    """Return the seconds of a step."""
    return statistics.median(side["turn_s"])


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads] if arguments.core is None else [arguments.core]
    loop = register_loop()
    peak = rate_of_cores(loop, cores) if loop is not None else 0.0
    rows = []
    for name in (name for name in arguments.models if arguments.only in (None, name.rpartition("-")[2])):
        spec = replace(small(SPECS[name]) if arguments.tiny else SPECS[name], precision=arguments.precision)
        with tempfile.TemporaryDirectory(prefix="models-") as folder:
            rows.append(measure(name, spec, Path(folder), arguments, cores))
    peak = max(peak, rate_of_cores(loop, cores)) if loop is not None else 0.0
    facts = _facts(arguments, peak, cores)
    print("\n".join(f"{key:<12} {value}" for key, value in facts.items()) + "\n")
    print(table(rows, peak) + "\n")
    inference = [
        time_of(row["contenders"]["onnxruntime"]) / time_of(row["contenders"]["penstock"])
        for row in rows
        if not row["optimizer"]
    ]
    if inference:
        print(f"inference against onnxruntime, geometric mean: {statistics.geometric_mean(inference):.3f}")
    wrong = [f"{row['model']}: {text}" for row in rows for text in row["wrong"]]
    print("\n".join(f"WRONG {text}" for text in wrong) or "all numbers agree")
    write_json(arguments.json, {"facts": facts, "peak_flops": peak, "threads": arguments.threads, "rows": rows})
    return 1 if wrong else 0


def _facts(arguments: argparse.Namespace, peak: float, cores: Sequence[int]) -> dict[str, str]:
    return {
        "cpu": f"{processor(cores)}, threads {arguments.threads}",
        "versions": f"{system()}, {versions('penstock', 'torch', 'onnxruntime', 'openvino', 'apache-tvm')}",
        "precision": arguments.precision,
        "turns": (
            f"{arguments.rounds} rounds of {arguments.steps} steps, "
            f"median of {'processor' if len(cores) == 1 else 'wall'} time"
        ),
        "peak": f"{peak / 1e9:.1f} GFLOP/s multiply-adds in registers" if peak else "not measured, there is no g++",
        "load": load(),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=SPECS, default=list(SPECS), metavar="NAME", help=f"of {', '.join(SPECS)}"
    )
    parser.add_argument("--only", choices=("train", "infer"), help="of these models")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default: 7)")
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn (default: 1)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of every contender (default: 1); above 1, wall time counts"
    )
    parser.add_argument("--core", type=int, help="where to measure (default: the first one allowed)")
    parser.add_argument(
        "--compile-limit",
        type=float,
        default=300,
        metavar="S",
        help="seconds torch.compile may take; 0 leaves it out (default: 300)",
    )
    parser.add_argument(
        "--precision",
        choices=("f32", "bf16"),
        default="f32",
        help="bf16: Penstock with --precision bf16, torch with autocast (default: f32)",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs and agrees")
    parser.add_argument("--json", metavar="FILE", help="write every turn")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
