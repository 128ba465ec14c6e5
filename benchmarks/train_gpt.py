"""Train a GPT-2-small-shaped model on two cores: Penstock's pipeline against torch's pipeline and against torch in one process.

    python benchmarks/train_gpt.py                                    GPT-2 small, all contenders in memory at once
    python benchmarks/train_gpt.py --layers 2 --width 128 --heads 4 --vocab 4096 --positions 64          a minute in all

Contenders (all float32, or bfloat16 with --precision bf16: torch by autocast; AdamW, untied head, the same first weights and the same batches, two cores):
    penstock-2bw     two processes of one thread, one per core, schedule 2bw
    penstock-1f1b    the same with schedule 1f1b
    torch-1f1b       two processes of one thread, one per core, torch.distributed.pipelining.Schedule1F1B over gloo
    torch-single     one process of two threads; a batch at once, or in microbatches with gradients accumulated: the faster way

All contenders are started and warmed up first and then take turns, round after round in changing order, each turn a few optimiser
steps from an empty pipeline to an empty pipeline, while the others sleep. So whatever else the machine does hits all alike. Reported:
the median over the turns. README.md beside this file says how to read the output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peak import rate_of_cores, register_loop
from processes import Contender, ContenderFailed, allowed_cores
from turns import Shape

HERE = Path(__file__).parent
NAMES = ("penstock-2bw", "penstock-1f1b", "torch-1f1b", "torch-single")
# Ways to run torch in one process: the batch at once or in microbatches, and what idle OpenMP threads do: spin, or sleep.
FORMS = ("whole-active", "whole-passive", "accumulated-active", "accumulated-passive")
TRIAL_STEPS = 2
WARMUP = 1


def main() -> int:
    arguments = _arguments()
    shape = Shape(**{name: getattr(arguments, name) for name in Shape.__dataclass_fields__})
    cores = allowed_cores()
    if len(cores) < 2:
        print("this benchmark needs two cores to pin processes to", file=sys.stderr)
        return 2
    cores = cores[:2]
    facts = _machine(cores, shape, arguments)
    for key, value in facts.items():
        print(f"{key:<12} {value}")
    loop = register_loop()
    peak = rate_of_cores(loop, cores) if loop is not None else 0.0
    with tempfile.TemporaryDirectory(prefix="train-gpt-") as folder:
        try:
            result = _measure(shape, cores, Path(folder), arguments)
        except ContenderFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    late = {"load after": _load()}
    peak = max(peak, rate_of_cores(loop, cores)) if loop is not None else 0.0
    late["peak"] = f"{peak / 1e9:.1f} GFLOP/s multiply-adds in registers, float32" if peak else "not measured, there is no g++"
    late["work"] = f"{shape.flops_per_step / 1e9:.1f} GFLOP per step in matrix products and attention"
    for key, value in late.items():
        print(f"{key:<12} {value}")
    print()
    _report(result, shape, peak)
    if arguments.json:
        counted = {"peak_flops": peak, "flops_per_step": shape.flops_per_step}
        report = {"facts": facts | late, "shape": json.loads(shape.to_json()), **counted, **result}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, spec in Shape.__dataclass_fields__.items():
        choices = ("f32", "bf16") if name == "precision" else None
        kind = type(spec.default)
        parser.add_argument(
            "--" + name.replace("_", "-"), type=kind, choices=choices, default=spec.default, help=f"default: {spec.default}"
        )
    parser.add_argument("--steps", type=int, default=3, help="optimiser steps in a turn (default: 3)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default: 7)")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--torch-split", type=int, help="blocks on torch's first rank (default: by floating-point operations)")
    parser.add_argument("--torch-form", choices=FORMS, help="of torch-single (default: try all, take the fastest)")
    parser.add_argument("--json", metavar="FILE", help="write every measured turn")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ contenders


def torch_split(shape: Shape) -> int:
    """Blocks on rank 0 so that both ranks do about the same floating-point operations. The head is the rest of rank 1's work."""
    block = 12 * shape.width**2 + shape.positions * shape.width
    head = shape.vocab * shape.width
    balanced = round((shape.layers * block + head) / 2 / block)
    return max(1, min(shape.layers - 1, balanced))


def _contender(name: str, shape: Shape, cores: list[int], folder: Path, arguments: argparse.Namespace, form: str = "") -> Contender:
    model = str(_model_file(shape, folder))
    apart = [[core] for core in cores]
    if name == "torch-1f1b":
        split = arguments.torch_split or torch_split(shape)
        port = _free_port()
        script = [str(HERE / "torch_contender.py"), shape.to_json(), model, "pipeline", str(WARMUP)]
        return Contender(name, [[*script, str(rank), str(port), str(split)] for rank in range(2)], apart, 1)
    if name == "torch-single":
        pieces, _, waiting = form.partition("-")
        script = [str(HERE / "torch_contender.py"), shape.to_json(), model, pieces, str(WARMUP), str(len(cores))]
        places = ",".join(f"{{{core}}}" for core in cores)
        openmp = {"OMP_WAIT_POLICY": waiting, "OMP_PROC_BIND": "true", "OMP_PLACES": places}
        return Contender(name, [script], [cores], len(cores), openmp, about={"waiting": waiting})
    schedule = name.removeprefix("penstock-")
    script = [str(HERE / "penstock_contender.py"), shape.to_json(), model, schedule, str(WARMUP), str(folder / name)]
    return Contender(name, [script], apart, 1)


def _model_file(shape: Shape, folder: Path) -> Path:
    from penstock.models import write_gpt

    path = folder / "gpt.onnx"
    if not path.exists():
        sizes = {name: getattr(shape, name) for name in ("layers", "width", "heads", "vocab", "positions", "seed")}
        write_gpt(path, batch=shape.microbatch_samples, **sizes)
    return path


def _fastest_form(shape: Shape, cores: list[int], folder: Path, arguments: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """Which form of torch-single to enter: all are tried alone, before anything else is started."""
    if arguments.torch_form:
        return arguments.torch_form, {}
    seconds = {}
    for form in FORMS:
        trial = _contender("torch-single", shape, cores, folder, arguments, form)
        try:
            trial.start()
            seconds[form] = min(trial.run(1) for _ in range(TRIAL_STEPS))
        finally:
            trial.stop()
    return min(seconds, key=lambda form: seconds[form]), seconds


# ------------------------------------------------------------------------------------------------ measuring


def _measure(shape: Shape, cores: list[int], folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    contenders: list[Contender] = []
    form, trial = _fastest_form(shape, cores, folder, arguments) if "torch-single" in arguments.contenders else ("", {})
    try:
        for name in arguments.contenders:
            contender = _contender(name, shape, cores, folder, arguments, form)
            contenders.append(contender)
            begin = time.perf_counter()
            contender.start()
            print(f"started {name} in {time.perf_counter() - begin:.0f} s {contender.about}", file=sys.stderr)
        turns, idle = _take_turns(contenders, arguments.steps, arguments.rounds)
        return {
            "steps_per_turn": arguments.steps,
            "torch_single_trial_s": trial,
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


def _take_turns(contenders: Sequence[Contender], steps: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Wall seconds of every turn, and the processor time each contender used while it was another's turn (should be next to none)."""
    turns: dict[str, list[float]] = {c.name: [] for c in contenders}
    idle = dict.fromkeys(turns, 0.0)
    for number in range(rounds):
        shift = number % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            before = {c.name: c.cpu_seconds() for c in contenders}
            turns[contender.name].append(contender.run(steps))
            for other in contenders:
                if other is not contender:
                    idle[other.name] += other.cpu_seconds() - before[other.name]
        print(f"round {number + 1} of {rounds}: " + ", ".join(f"{n} {t[-1]:.2f} s" for n, t in turns.items()), file=sys.stderr)
    return turns, idle


# ------------------------------------------------------------------------------------------------ reporting


def share_of_peak(flops: float, seconds: float, peak: float) -> str:
    return f"{100 * flops / seconds / peak:.0f} %" if peak else "-"


def _report(result: dict[str, Any], shape: Shape, peak: float) -> None:
    tokens = shape.tokens_per_step * result["steps_per_turn"]
    rows = result["contenders"]
    speed = {name: tokens / statistics.median(row["turn_s"]) for name, row in rows.items()}
    references = [name for name in ("torch-1f1b", "torch-single") if name in rows]
    heads = ["contender", "tokens/s", "slowest", "fastest", "of peak", *(f"vs {r}" for r in references), "peak MiB per process"]
    lines = []
    for name, row in rows.items():
        peaks = " + ".join(f"{peak / 2**20:.0f}" for peak in row["peak_bytes"].values())
        spread = [f"{tokens / max(row['turn_s']):.1f}", f"{tokens / min(row['turn_s']):.1f}"]
        share = share_of_peak(shape.flops_per_step, shape.tokens_per_step / speed[name], peak)
        lines.append([name, f"{speed[name]:.1f}", *spread, share, *(f"{speed[name] / speed[r]:.3f}" for r in references), peaks])
    widths = [max(len(str(line[i])) for line in [heads, *lines]) for i in range(len(heads))]
    for line in [heads, *lines]:
        print(
            "  ".join(
                f"{cell:<{w}}" if i in (0, len(heads) - 1) else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
        )
    print()
    for name, row in rows.items():
        about = ", ".join(f"{key} {value}" for key, value in row["about"].items())
        print(f"{name}: {about}; loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}")
    if result["torch_single_trial_s"]:
        tried = ", ".join(f"{form} {seconds:.2f} s per step" for form, seconds in result["torch_single_trial_s"].items())
        print(f"torch-single runs in the form that was fastest when tried alone: {tried}")
    _report_losses(rows)
    for name in rows:
        for reference in references:
            if name.startswith("penstock"):
                ratio = speed[name] / speed[reference]
                print(f"{name} is {'AHEAD of' if ratio > 1 else 'BEHIND'} {reference}: {ratio:.3f} of its speed")
    for name, row in rows.items():
        if row["cpu_s_asleep"] > max(0.5, 0.01 * sum(sum(other["turn_s"]) for other in rows.values())):
            print(f"warning: {name} used {row['cpu_s_asleep']:.1f} s of processor time during the turns of others, which slows them")


def _report_losses(rows: dict[str, Any]) -> None:
    """All contenders but 2bw train the same recurrence on the same data, so their losses must agree."""
    same = {name: row["losses"] for name, row in rows.items() if name != "penstock-2bw"}
    if len(same) > 1:
        names = list(same)
        far = max(abs(a - b) / abs(b) for name in names[1:] for a, b in zip(same[name], same[names[0]], strict=True))
        print(f"losses of {', '.join(names)} over {len(same[names[0]])} steps: largest relative difference {far:.1e}")


def _machine(cores: Sequence[int], shape: Shape, arguments: argparse.Namespace) -> dict[str, str]:
    cpu = _field("/proc/cpuinfo", "model name") or platform.processor()
    flags = (_field("/proc/cpuinfo", "flags") or "").split()
    vectors = [flag for flag in ("avx2", "fma", "avx512f", "avx512vl", "amx_tile") if flag in flags]
    memory = int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20
    libraries = ", ".join(f"{name} {version(name)}" for name in ("penstock", "torch", "apache-tvm", "numpy"))
    sizes = f"{shape.layers} layers, width {shape.width}, {shape.heads} heads, vocabulary {shape.vocab}, {shape.parameters / 1e6:.1f} M parameters"
    data = f"{shape.microbatches} microbatches of {shape.microbatch_samples} x {shape.positions} = {shape.tokens_per_step} tokens per step"
    return {
        "processor": f"{cpu} ({' '.join(vectors)}), cores {', '.join(map(str, cores))} of {os.cpu_count()}, {memory:.0f} GiB memory",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {libraries}",
        "model": f"{sizes}, {shape.precision}",
        "data": data,
        "turns": f"{arguments.rounds} rounds of {arguments.steps} steps each after {WARMUP} step of warm-up",
        "load before": _load(),
    }


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _load() -> str:
    return " ".join(f"{x:.2f}" for x in os.getloadavg()) + " (1, 5, 15 minutes)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
