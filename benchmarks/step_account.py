"""Where the time of a training step goes on two cores: the account of `penstock inspect --where-time-goes`, as a table.

    python benchmarks/step_account.py                                   GPT-2 small under 2bw, eager-2bw and 1f1b
    python benchmarks/step_account.py --layers 4 --json account.json    four layers of the same width
    python benchmarks/step_account.py --model resnet                    ResNet-50

Each schedule trains the model of training.py with a trace, and nothing else runs. Then every kernel of it is measured
alone. `at peak` is the counted work of a step (training_shape.py) at the peak of both cores (peak.py), and `of peak`
its share of the step. The other columns are seconds of a step of one rank, as the docstring of
src/penstock/inspection/traces/time.py defines them:

    kernels     its kernels, each alone on this machine
    in the run  computing in the run, above its kernels alone: caches and memory that both ranks share
    behind      waiting for a message that was not sent yet
    rest        messages, sums, drops, and what lies between actions
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import load, markdown, processor, system, versions, write_json
from peak import rate_of_cores, register_loop
from penstock_contender import compile_model
from processes import allowed_cores
from training_shape import Shape, add_shape_arguments, shape_of, write_model

SCHEDULES = ("2bw", "eager-2bw", "1f1b")
_SECONDS = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of a traced run, of which 3 do not count (default: 8)"
    )
    parser.add_argument(
        "--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME", help=f"default: {' '.join(SCHEDULES)}"
    )
    parser.add_argument("--json", metavar="FILE", help="write the accounts")
    arguments = parser.parse_args()
    shape, cores = shape_of(arguments), allowed_cores()[:2]
    facts = {
        "processor": processor(cores),
        "system": f"{system()}, {versions('penstock', 'apache-tvm', 'torch', 'numpy')}",
        "model": f"{shape.model}: {shape.told()}, {shape.precision}, {shape.optimizer}",
        "data": f"{shape.microbatches} microbatches of {shape.microbatch_samples} samples",
        "load before": load(),
    }
    loop = register_loop()
    peak = rate_of_cores(loop, cores) if loop is not None else 0.0
    with tempfile.TemporaryDirectory(prefix="account-") as folder:
        model = write_model(shape, Path(folder) / "model.onnx")
        accounts = {
            schedule: _account(shape, model, schedule, Path(folder) / schedule, arguments.steps)
            for schedule in arguments.schedules
        }
    peak = max(peak, rate_of_cores(loop, cores)) if loop is not None else 0.0
    facts |= {"load after": load(), "peak": f"{peak / 1e9:.1f} GFLOP/s multiply-adds in registers of both cores"}
    for key, value in facts.items():
        print(f"{key:<12} {value}")
    report = {"facts": facts, "peak_flops": peak, "flops_per_step": shape.flops_per_step, "accounts": accounts}
    print("\n" + markdown(*table_of(report)))
    write_json(arguments.json, report)
    return 0


def _account(shape: Shape, model: Path, schedule: str, bundle: Path, steps: int) -> dict[str, Any]:
    """Train with a trace, and return the account of a step."""
    compile_model(shape, str(model), schedule, bundle)
    trace = bundle.with_suffix(".trace.json")
    _penstock("run", str(bundle), "--steps", str(steps), "--trace", str(trace))
    looked = _penstock("inspect", str(bundle), "--where-time-goes", "--trace", str(trace), "--measure", "--json")
    account: dict[str, Any] = json.loads(looked)
    print(f"{schedule}: a step takes {account['seconds']:.3f} s", file=sys.stderr)
    return account


def _penstock(*words: str) -> str:
    command = [sys.executable, "-m", "penstock", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:2])} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def table_of(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table: a line for each rank of each schedule."""
    heads = ["schedule", "rank", "step s", "at peak", "of peak", "kernels", "in the run", "behind", "rest"]
    at_peak = report["flops_per_step"] / report["peak_flops"] if report["peak_flops"] else None
    lines = []
    for schedule, account in report["accounts"].items():
        step = account["seconds"]
        for rank in account["ranks"]:
            computing = sum(graph["run_s"] for graph in rank["graphs"])
            alone = sum(graph["alone_s"] for graph in rank["graphs"])
            rest = sum(rank[f"{part}_s"] for part in ("on_the_way", "sending", "sums", "drops", "between"))
            parts = [alone, computing - alone, rank["behind_s"], rest]
            shares = ["-", "-"] if at_peak is None else [f"{at_peak:.3f}", f"{100 * at_peak / step:.0f} %"]
            lines.append([schedule, str(rank["rank"]), f"{step:.3f}", *shares, *(f"{part:.3f}" for part in parts)])
    return heads, lines


if __name__ == "__main__":
    sys.exit(main())
