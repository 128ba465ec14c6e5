"""Predicted and measured peak memory of workers, and a run under a limit that only fits with recomputation.

    python benchmarks/memory.py                     eight configurations, then the limit
    python benchmarks/memory.py --only gpt-2bw-auto --no-limit

Models are GPTs, MLPs and a convolutional network, each trained for a few steps in real worker processes. Predicted is
the plan's number for a rank, which counts tensors. Measured is the largest resident size of its process (VmHWM) less
its size before it loaded its variables (interpreter, torch, TVM, code of the stage), printed as base. `auto` gives
devices a memory in the middle between the peaks of `none` and `all`.

The limit: each rank may have its private memory from before the run (RLIMIT_DATA, which needs no privileges), and the
prediction for the plan with recomputation and a tenth. That plan trains to the end. The one without recomputation must
end with an error that says why. Linux only.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import write_json
from truth_runs import batches

import penstock as ps
from penstock.models import write_cnn, write_gpt, write_mlp

# More than are sent to workers ahead.
STEPS = 5
UNLIMITED = 1 << 50
MARGIN = 1.1


def _gpt(path: Path) -> Path:
    return write_gpt(path, layers=6, width=384, heads=6, vocab=4096, positions=256, batch=8)


def _mlp(path: Path) -> Path:
    return write_mlp(path, [512, *[1536] * 8, 16], batch=2048)


def _cnn(path: Path) -> Path:
    return write_cnn(path, channels=(3, 32, 64, 128), size=64, classes=10, batch=80)


MODELS: dict[str, Callable[[Path], Path]] = {"gpt": _gpt, "mlp": _mlp, "cnn": _cnn}


@dataclass(frozen=True)
class Configuration:
    model: str
    schedule: str
    stages: int
    microbatches: int
    recompute: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.schedule}-{self.stages}-{self.recompute}"


CONFIGURATIONS = (
    Configuration("gpt", "1f1b", 2, 4, "none"),
    Configuration("gpt", "1f1b", 2, 4, "all"),
    Configuration("gpt", "2bw", 2, 4, "auto"),
    Configuration("gpt", "gpipe", 4, 4, "auto"),
    Configuration("gpt", "2bw", 4, 4, "none"),
    Configuration("mlp", "2bw", 2, 4, "none"),
    Configuration("mlp", "gpipe", 4, 6, "auto"),
    Configuration("cnn", "1f1b", 2, 4, "none"),
)
LIMITED = Configuration("gpt", "gpipe", 2, 6, "auto")


@dataclass(frozen=True)
class Rank:
    rank: int
    predicted: int
    measured: int
    base: int

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def make_plan(configuration: Configuration, model: ps.Model, recompute: str, memory: int) -> ps.Plan:
    devices = (replace(d, threads=1, spaces=(("ram", memory),)) for d in ps.Cluster.local(configuration.stages).devices)
    training = ps.Training(
        loss="mse" if configuration.model == "mlp" else "cross_entropy",
        optimizer=ps.AdamW(lr=1e-3),
        microbatches=configuration.microbatches,
    )
    return ps.plan(model, ps.Cluster(tuple(devices)), training, schedule=configuration.schedule, recompute=recompute)


def plan_of(configuration: Configuration, model: ps.Model) -> ps.Plan:
    if configuration.recompute != "auto":
        return make_plan(configuration, model, configuration.recompute, UNLIMITED)
    low, high = (max(peaks(make_plan(configuration, model, mode, UNLIMITED)).values()) for mode in ("all", "none"))
    return make_plan(configuration, model, "auto", (low + high) // 2)


def table(plan: ps.Plan) -> dict[int, dict[str, int]]:
    return {int(rank): row for rank, row in plan.as_dict()["memory"].items()}


def peaks(plan: ps.Plan) -> dict[int, int]:
    return {rank: row["peak"] for rank, row in table(plan).items()}


def measure(configuration: Configuration, folder: Path) -> list[Rank]:
    model = ps.from_onnx(MODELS[configuration.model](folder / "model.onnx"))
    plan = plan_of(configuration, model)
    bundle = ps.compile(plan, folder / "bundle")
    with ps.open(bundle, timeout=600) as job:
        list(job.run(batches(plan.module, STEPS)))
        measured = list(zip(job.peak_bytes, job.base_bytes, strict=True))
    return [
        Rank(rank, peak, measured[rank][0] - measured[rank][1], measured[rank][1]) for rank, peak in peaks(plan).items()
    ]


# ------------------------------------------------------------------------------------------------ the limit


def run_limited(plan: ps.Plan, bundle: Path, caps: dict[int, int]) -> str:
    """Train with so many bytes of tensors for each rank. Return the error, "" if there is none."""
    fixed = {
        rank: sum(row[name] for name in ("weights", "gradients", "state", "buffers"))
        for rank, row in table(plan).items()
    }
    try:
        with ps.open(bundle, timeout=600) as job:
            for rank, pid in enumerate(job.workers.process_ids()):
                # Variables have all of their memory by this point.
                limit = _private_bytes(pid) - fixed[rank] + caps[rank]
                resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
            list(job.run(batches(plan.module, STEPS)))
    except ps.PenstockError as error:
        return str(error)
    return ""


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def limit(folder: Path) -> dict[str, Any]:
    model = ps.from_onnx(MODELS[LIMITED.model](folder / "model.onnx"))
    chosen, whole = plan_of(LIMITED, model), make_plan(LIMITED, model, "none", UNLIMITED)
    caps = {rank: int(peak * MARGIN) for rank, peak in peaks(chosen).items()}
    outcomes = {}
    for name, plan in (("auto", chosen), ("none", whole)):
        bundle = ps.compile(plan, folder / name)
        outcomes[name] = run_limited(plan, bundle, caps)
        print(f"  {name}: {outcomes[name] or 'trained to the end'}", file=sys.stderr, flush=True)
    return {
        "configuration": LIMITED.name,
        "caps": caps,
        "predicted": {"auto": peaks(chosen), "none": peaks(whole)},
        "errors": outcomes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(c.name for c in CONFIGURATIONS)}"
    )
    parser.add_argument("--no-limit", action="store_true", help="leave out the run under a limit")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    arguments = parser.parse_args()
    rows, report = [], {}
    print(
        "| configuration | rank | predicted MiB | measured MiB | ratio | base MiB |\n| --- | --- | --- | --- | --- | "
        "--- |"
    )
    for configuration in CONFIGURATIONS:
        if arguments.only and configuration.name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory(prefix="memory-") as folder:
            for rank in measure(configuration, Path(folder)):
                rows.append({"configuration": configuration.name, **vars_of(rank)})
                sizes = (
                    f"{rank.predicted / 2**20:.1f} | {rank.measured / 2**20:.1f} | {rank.ratio:.3f} | "
                    f"{rank.base / 2**20:.1f}"
                )
                print(f"| {configuration.name} | {rank.rank} | {sizes} |", flush=True)
    report["ranks"] = rows
    if rows:
        print(f"ratios from {min(r['ratio'] for r in rows):.3f} to {max(r['ratio'] for r in rows):.3f}")
    failed = any(abs(r["ratio"] - 1) > 0.1 for r in rows)
    if not arguments.no_limit:
        with tempfile.TemporaryDirectory(prefix="memory-") as folder:
            report["limit"] = outcome = limit(Path(folder))
        print(
            f"limit {outcome['configuration']}: MiB of tensors "
            f"{[round(n / 2**20, 1) for n in outcome['caps'].values()]}"
        )
        for name, error in outcome["errors"].items():
            print(f"  {name}: " + (f"ended with: {error}" if error else "trained to the end"))
        failed |= bool(outcome["errors"]["auto"]) or not outcome["errors"]["none"]
    write_json(arguments.json, report)
    return int(failed)


def vars_of(rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "predicted": rank.predicted,
        "measured": rank.measured,
        "base": rank.base,
        "ratio": rank.ratio,
    }


if __name__ == "__main__":
    sys.exit(main())
