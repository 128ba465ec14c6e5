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
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import load, markdown, processor, system, versions, write_json
from model_contenders import Contender, contenders_of
from model_specs import SPECS, Spec, feeds_of, small, write_model
from peak import rate_of_cores, register_loop
from torch_models import build
from turns import in_turn

# Losses after a few updates against eager torch's, relative to the first; results, relative to the largest of float64.
LOSS_TOLERANCE, RESULT_TOLERANCE = 1e-4, 2e-5
# Losses must fall by this many times the tolerance while they are compared, or agreement would say nothing about
# gradients.
LEAST_FALL = 30
# The same in bf16, whose unit roundoff is 4e-3: contenders round at other places, so this finds gross errors only.
LOW_LOSS_TOLERANCE, LOW_RESULT_TOLERANCE = 1e-2, 1e-1
CHECKED_STEPS = 4


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
