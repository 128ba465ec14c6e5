"""Train a model on two cores: Penstock's pipeline against torch's and DeepSpeed's, and torch in one process.

    python benchmarks/training.py                                     GPT-2 small, the contenders in memory at once
    python benchmarks/training.py --model bert                        BERT-base; resnet: ResNet-50
    python benchmarks/training.py --layers 2 --width 128 --heads 4 --vocab 4096 --positions 64          a minute in all

All contenders are float32, or bfloat16 with --precision bf16 (torch by autocast), with the same optimiser, first
weights and batches, on two cores:

    penstock-2bw     two processes of one thread, one per core, schedule 2bw
    penstock-1f1b    the same with schedule 1f1b
    other-pipeline   two processes of one thread, one per core: torch.distributed.pipelining over gloo under one of its
                     schedules, or DeepSpeed's PipelineModule, which is left out where it is not installed: the fastest
    torch-single     one process of two threads; a batch at once, or in microbatches with gradients accumulated: the
                     faster

A contender with several forms is tried in each of them, alone, before any other process starts, and its fastest form
enters. All contenders that enter are started and warmed up first. Then they take turns, round after round in changing
order, each turn a few optimiser steps from an empty pipeline to an empty pipeline, while the others sleep. So other
work on the machine hits all alike. The figure is the median over the turns. README.md beside this file explains the
output.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import load, processor, system, versions, write_json
from peak import rate_of_cores, register_loop
from processes import Contender, ContenderFailed, allowed_cores
from training_shape import Shape, add_shape_arguments, shape_of, write_model
from turns import in_turn

from penstock.support.terminal import table

HERE = Path(__file__).parent
NAMES = ("penstock-2bw", "penstock-1f1b", "other-pipeline", "torch-single")
PIPELINE, SINGLE, DEEPSPEED = "other-pipeline", "torch-single", "deepspeed"
# Ways to run a contender. Torch in one process: the batch at once or in microbatches, and the behaviour of idle OpenMP
# threads: spin, or sleep.
FORMS = {
    PIPELINE: ("torch-1f1b", "torch-gpipe", "torch-interleaved-zb", DEEPSPEED),
    SINGLE: ("whole-active", "whole-passive", "accumulated-active", "accumulated-passive"),
}
WARMUP = 1


def main() -> int:
    arguments = _arguments()
    shape = shape_of(arguments)
    cores = allowed_cores()
    if len(cores) < 2:
        print("this benchmark needs two cores to pin processes to", file=sys.stderr)
        return 2
    cores = cores[:2]
    facts = {
        "processor": processor(cores),
        "system": f"{system()}, {versions('penstock', 'torch', 'apache-tvm', 'numpy', 'deepspeed')}",
        "model": f"{shape.model}: {shape.told()}, {shape.precision}, {shape.optimizer}",
        "data": (
            f"{shape.microbatches} microbatches of {shape.microbatch_samples} samples: "
            f"{shape.units_per_step} {shape.unit} per step"
        ),
        "turns": f"{arguments.rounds} rounds of {arguments.steps} steps each after {WARMUP} step of warm-up",
        "load before": load(),
    }
    for key, value in facts.items():
        print(f"{key:<12} {value}")
    loop = register_loop()
    peak = rate_of_cores(loop, cores) if loop is not None else 0.0
    with tempfile.TemporaryDirectory(prefix="training-") as folder:
        try:
            result = _measure(shape, cores, Path(folder), arguments)
        except ContenderFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    late = {"load after": load()}
    peak = max(peak, rate_of_cores(loop, cores)) if loop is not None else 0.0
    late["peak"] = (
        f"{peak / 1e9:.1f} GFLOP/s multiply-adds in registers, float32" if peak else "not measured, there is no g++"
    )
    late["work"] = f"{shape.flops_per_step / 1e9:.1f} GFLOP per step in products, convolutions and attention"
    for key, value in late.items():
        print(f"{key:<12} {value}")
    print()
    counted = {
        "unit": shape.unit,
        "units_per_step": shape.units_per_step,
        "peak_flops": peak,
        "flops_per_step": shape.flops_per_step,
    }
    report = {"facts": facts | late, "shape": json.loads(shape.to_json()), **counted, **result}
    _report(report)
    write_json(arguments.json, report)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, help="optimiser steps in a turn (default: 3)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default: 7)")
    parser.add_argument(
        "--trial-steps",
        type=int,
        default=2,
        help="steps of a form that is tried, of which the fastest counts (default: 2)",
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    for name, forms in FORMS.items():
        said = f"how {name} runs, of {', '.join(forms)} (default: try all, take the fastest)"
        parser.add_argument(f"--{name}", nargs="+", choices=forms, default=list(forms), metavar="FORM", help=said)
    parser.add_argument("--json", metavar="FILE", help="write every measured turn")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ contenders


def _contender(name: str, shape: Shape, cores: list[int], folder: Path, form: str = "") -> Contender:
    model = str(write_model(shape, folder / f"{shape.model}.onnx"))
    apart = [[core] for core in cores]
    if name == PIPELINE:
        port = str(_free_port())
        script, schedule = ("deepspeed", []) if form == DEEPSPEED else ("torch", [form.removeprefix("torch-")])
        words = [str(HERE / f"{script}_contender.py"), shape.to_json(), model, *schedule, str(WARMUP)]
        return Contender(name, [[*words, str(rank), port] for rank in range(2)], apart, 1, about={"form": form})
    if name == SINGLE:
        pieces, _, waiting = form.partition("-")
        words = [str(HERE / "torch_contender.py"), shape.to_json(), model, pieces, str(WARMUP), str(len(cores))]
        places = ",".join(f"{{{core}}}" for core in cores)
        openmp = {"OMP_WAIT_POLICY": waiting, "OMP_PROC_BIND": "true", "OMP_PLACES": places}
        return Contender(name, [words], [cores], len(cores), openmp, about={"waiting": waiting})
    schedule = name.removeprefix("penstock-")
    words = [str(HERE / "penstock_contender.py"), shape.to_json(), model, schedule, str(WARMUP), str(folder / name)]
    return Contender(name, [words], apart, 1)


def _try_forms(
    name: str, forms: Sequence[str], steps: int, shape: Shape, cores: list[int], folder: Path
) -> dict[str, dict[str, Any]]:
    """Measure each form alone: seconds of a step, memory and losses.

    A form that fails has an error instead, which is printed.
    """
    rows: dict[str, dict[str, Any]] = {}
    for form in forms:
        trial = _contender(name, shape, cores, folder, form)
        try:
            trial.start()
            seconds = min(trial.run(1) for _ in range(steps))
            rows[form] = {"seconds": seconds, "peak_bytes": trial.peaks(), "losses": trial.losses}
            print(f"{name} as {form}: {seconds:.2f} s per step", file=sys.stderr)
        except ContenderFailed as failure:
            rows[form] = {"error": str(failure)}
            print(f"{name} as {form}: {failure}", file=sys.stderr)
        finally:
            trial.stop()
    return rows


def _fastest(name: str, tried: dict[str, dict[str, Any]]) -> str:
    seconds = {form: row["seconds"] for form, row in tried.items() if "seconds" in row}
    if not seconds:
        raise ContenderFailed(f"{name} runs in none of its forms")
    return min(seconds, key=lambda form: seconds[form])


# ------------------------------------------------------------------------------------------------ measuring


def _measure(shape: Shape, cores: list[int], folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    tried: dict[str, dict[str, Any]] = {}
    for name in (name for name in FORMS if name in arguments.contenders):
        forms = getattr(arguments, name.replace("-", "_"))
        if DEEPSPEED in forms and find_spec(DEEPSPEED) is None:
            forms = [form for form in forms if form != DEEPSPEED]
            absent[DEEPSPEED] = "not installed"
            print(f"{DEEPSPEED}: not installed", file=sys.stderr)
        tried[name] = (
            _try_forms(name, forms, arguments.trial_steps, shape, cores, folder)
            if len(forms) > 1
            else {forms[0]: {"seconds": 0.0}}
        )
    try:
        for name in arguments.contenders:
            contender = _contender(name, shape, cores, folder, _fastest(name, tried[name]) if name in FORMS else "")
            contenders.append(contender)
            begin = time.perf_counter()
            contender.start()
            print(f"started {name} in {time.perf_counter() - begin:.0f} s {contender.about}", file=sys.stderr)
        turns, idle = take_turns(contenders, arguments.steps, arguments.rounds)
        return {
            "steps_per_turn": arguments.steps,
            "tried": {name: rows for name, rows in tried.items() if len(rows) > 1},
            "absent": absent,
            "contenders": {
                c.name: {
                    "about": c.about,
                    "turn_s": turns[c.name],
                    "cpu_s_asleep": idle[c.name],
                    "peak_bytes": c.peaks(),
                    "startup_peak_bytes": c.startup_peaks,
                    "losses": c.losses,
                }
                for c in contenders
            },
        }
    finally:
        for contender in contenders:
            contender.stop()


def take_turns(
    contenders: Sequence[Contender], steps: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return wall seconds of every turn, and each contender's processor time while others had their turn.

    The latter should be next to none.
    """
    turns: dict[str, list[float]] = {c.name: [] for c in contenders}
    idle = dict.fromkeys(turns, 0.0)
    for number, contender in in_turn(contenders, rounds):
        before = {c.name: c.cpu_seconds() for c in contenders}
        turns[contender.name].append(contender.run(steps))
        for other in contenders:
            if other is not contender:
                idle[other.name] += other.cpu_seconds() - before[other.name]
        if all(len(each) == number + 1 for each in turns.values()):
            print(
                f"round {number + 1} of {rounds}: " + ", ".join(f"{n} {t[-1]:.2f} s" for n, t in turns.items()),
                file=sys.stderr,
            )
    return turns, idle


# ------------------------------------------------------------------------------------------------ reporting


def rates(report: dict[str, Any]) -> dict[str, float]:
    """Return tokens or images per second of each contender, by the median over its turns."""
    units = report["units_per_step"] * report["steps_per_turn"]
    return {name: units / statistics.median(row["turn_s"]) for name, row in report["contenders"].items()}


def rows_of(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the table."""
    units, rows, speed = report["units_per_step"] * report["steps_per_turn"], report["contenders"], rates(report)
    references = [name for name in rows if not name.startswith("penstock")]
    heads = [
        "contender",
        f"{report['unit']}/s",
        "slowest",
        "fastest",
        "of peak",
        *(f"vs {r}" for r in references),
        "peak MiB per process",
    ]
    lines = []
    for name, row in rows.items():
        peaks = " + ".join(f"{peak / 2**20:.0f}" for peak in row["peak_bytes"].values())
        spread = [f"{units / max(row['turn_s']):.1f}", f"{units / min(row['turn_s']):.1f}"]
        flops = report["flops_per_step"] * speed[name] / report["units_per_step"]
        share = f"{100 * flops / report['peak_flops']:.0f} %" if report["peak_flops"] else "-"
        lines.append(
            [name, f"{speed[name]:.1f}", *spread, share, *(f"{speed[name] / speed[r]:.3f}" for r in references), peaks]
        )
    return heads, lines


def far_apart(report: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative difference of the losses of contenders and of forms that were tried.

    The reference is the last contender that trains the same recurrence: torch in one process, where it takes part. 2bw
    trains another one.
    """
    same = {name: row["losses"] for name, row in report["contenders"].items() if name != "penstock-2bw"}
    forms = {form: row["losses"] for rows in report["tried"].values() for form, row in rows.items() if "losses" in row}
    judge = next(reversed(same.values()), [])
    return {
        name: max((abs(a - b) / abs(b) for a, b in zip(losses, judge, strict=False)), default=0.0)
        for name, losses in (same | forms).items()
    }


def _report(report: dict[str, Any]) -> None:
    rows, speed = report["contenders"], rates(report)
    print(table(*rows_of(report)) + "\n")
    for name, row in rows.items():
        about = ", ".join(f"{key} {value}" for key, value in row["about"].items())
        print(f"{name}: {about}; loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}")
    for name, forms in report["tried"].items():
        times = ", ".join(
            f"{form} {row['seconds']:.2f} s per step" if "seconds" in row else f"{form} failed"
            for form, row in forms.items()
        )
        print(f"{name} runs in the form that was fastest when tried alone: {times}")
    print(
        "losses differ, relatively, by at most: "
        + ", ".join(f"{name} {apart:.1e}" for name, apart in far_apart(report).items())
    )
    for name in (name for name in rows if name.startswith("penstock")):
        for reference in (name for name in rows if not name.startswith("penstock")):
            ratio = speed[name] / speed[reference]
            print(f"{name} is {'AHEAD of' if ratio > 1 else 'BEHIND'} {reference}: {ratio:.3f} of its speed")
    for name, row in rows.items():
        if row["cpu_s_asleep"] > max(0.5, 0.01 * sum(sum(other["turn_s"]) for other in rows.values())):
            print(
                f"warning: {name} used {row['cpu_s_asleep']:.1f} s of processor time during the turns of others, "
                "which slows them"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
