"""Single kernels, ours against torch, on one thread of one core.

    python benchmarks/kernels.py                                all rows: some minutes, about 4 GB of memory
    python benchmarks/kernels.py --only 'gemm|conv.*1x1'        rows whose name matches
    python benchmarks/kernels.py --list                         names of all rows

Each row is one operation or small fused group (kernel_rows.py, kernel_updates.py, kernel_memory.py). Ours is compiled
like a stage of a model: the graph goes through `fuse`, the TVM back end compiles and loads it, and it is called with
torch tensors. Torch's is its fastest form. After a check of both results against float64, the two are called in turn,
one call each, the first of a pair alternating. The figure is the median of the processor time of the thread, which
other programs on the core do not change. Wall time is in the JSON as well.

A row fails if it does not compile, does not run, or has an error above the tolerance (largest difference over largest
magnitude, for each result). It also fails if torch's error is more than ten times the tolerance, so that it cannot be
the same computation. Failed rows are in the table, are listed again, and make the exit code 1. README.md beside this
file explains the output.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import load, processor, system, versions, write_json

if TYPE_CHECKING:
    from kernel_rows import Row, Work

    from penstock.backends.interface import StageProgram

ONE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS")
TOLERANCE = 1e-5
# Torch's result is checked too, to be the same computation. Its own rounding, as in some weight gradients, is not our
# row's failure.
SAME = 10.0
SLOW = 0.95
WARMUP = 2
# From this ratio of the process's processor time to the measuring thread's, a warning says that other threads computed.
OTHERS = 1.05
# Quick rows are called more often than `--repeats`, until this many seconds are measured, at most so many times as
# often.
LEAST_SECONDS, MOST_TIMES = 0.2, 20


@dataclass
class Side:
    """Measured times of one side, and its largest error."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    error: float = math.nan

    @property
    def median(self) -> float:
        return statistics.median(self.cpu_s)


@dataclass
class Outcome:
    """The result of one row. `failure` says why it does not count."""

    name: str
    family: str
    flops: float = 0.0
    moved: float = 0.0
    ours: Side = field(default_factory=Side)
    theirs: Side = field(default_factory=Side)
    form: str = ""
    build_s: float = math.nan
    failure: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.ours.cpu_s)

    @property
    def ratio(self) -> float:
        """The speed of ours over torch's: above 1, ours is faster."""
        return self.theirs.median / self.ours.median

    @property
    def work(self) -> float:
        return self.flops or self.moved


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    _settle(arguments.core)
    import kernel_memory  # noqa: F401  (adds its rows)
    import kernel_order  # noqa: F401  (adds its rows)
    import kernel_updates  # noqa: F401  (likewise)
    from kernel_rows import select

    rows = select(re.compile(arguments.only).search)
    if arguments.list:
        print("\n".join(r.name for r in rows))
        return 0
    if not rows:
        print(f"no row matches {arguments.only!r}; --list shows all", file=sys.stderr)
        return 2
    facts = _machine(arguments)
    for key, value in facts.items():
        print(f"{key:<12} {value}")
    before = _peaks()
    outcomes = []
    for number, row in enumerate(rows, 1):
        outcomes.append(run_row(row, arguments.repeats, arguments.tolerance))
        print(f"{number} of {len(rows)}: {_progress(outcomes[-1])}", file=sys.stderr)
    peaks = _best(before, _peaks(), outcomes)
    print(f"{'load after':<12} {load()}\n")
    report(outcomes, peaks)
    write_json(
        arguments.json,
        {"facts": facts, "peaks": peaks, "tolerance": arguments.tolerance, "rows": [_as_dict(o) for o in outcomes]},
    )
    return 1 if any(o.failure for o in outcomes) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--repeats", type=int, default=15, help="calls of each side, at least (default: 15)")
    parser.add_argument("--core", type=int, default=None, help="core to run on (default: the last one allowed)")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"largest error that passes (default: {TOLERANCE})"
    )
    parser.add_argument("--json", metavar="FILE", help="write every measured call")
    return parser.parse_args(argv)


def _settle(core: int | None) -> None:
    """Use one core, and one thread in every library.

    It must run before torch and TVM are loaded, which start threads.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if core is None else core})
    os.environ |= dict.fromkeys(ONE, "1")
    # Compiled anew unless the caller names a cache: the compiler itself and its time are to be measured.
    os.environ.setdefault("PENSTOCK_CACHE", "off")
    import torch

    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------ one row


def run_row(row: Row, repeats: int, tolerance: float) -> Outcome:
    """Build, check and measure one row. Any error is the row's failure."""
    outcome = Outcome(row.name, row.family)
    try:
        work = row.make()
        outcome.flops, outcome.moved = work.flops, work.moved
        with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
            begin = time.perf_counter()
            program = _program(work, Path(folder))
            outcome.build_s = time.perf_counter() - begin
            _measure(work, program, outcome, repeats)
    except Exception as error:
        print(f"{row.name}:\n{traceback.format_exc()}", file=sys.stderr)
        outcome.failure = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[-1][:160]}"
        return outcome
    limits = (("our", outcome.ours, tolerance), ("torch's", outcome.theirs, SAME * tolerance))
    problems = [f"{who} error {side.error:.1e}" for who, side, limit in limits if not side.error <= limit]
    outcome.failure = ", ".join(problems)
    return outcome


def _program(work: Work, folder: Path) -> StageProgram:
    from kernel_graphs import fused

    from penstock.backends.registry import backend_of

    module, backend = fused(*work.graphs), backend_of("tvm")
    files = backend.compile_stages(module, [0], folder)[0]
    return backend.load_stage(module, 0, [folder / name for name in files], threads=1)


def _measure(work: Work, program: StageProgram, outcome: Outcome, repeats: int) -> None:
    work.reset()
    outcome.ours.error = largest_error(work.call(program), work.exact())
    outcome.form, theirs = _fastest(work.forms)
    work.reset()
    outcome.theirs.error = largest_error(theirs(), work.exact())
    sides: list[tuple[Side, Callable[[], object]]] = [
        (outcome.ours, lambda: work.call(program)),
        (outcome.theirs, theirs),
    ]
    for _, call in sides * WARMUP:
        call()
    used = 0.0
    process, thread = time.process_time(), time.thread_time()
    for number in range(repeats * MOST_TIMES):
        if number >= repeats and used > LEAST_SECONDS:
            break
        for side, call in sides if number % 2 else sides[::-1]:
            used += _time(side, call)
    process, thread = time.process_time() - process, time.thread_time() - thread
    if process > OTHERS * thread + 0.01:
        print(
            f"warning: other threads computed too: {process:.3f} s in the process, {thread:.3f} s in the measured "
            "thread",
            file=sys.stderr,
        )


def _time(side: Side, call: Callable[[], object]) -> float:
    wall, cpu = time.perf_counter(), time.thread_time()
    kept = call()
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    side.cpu_s.append(cpu)
    side.wall_s.append(wall)
    del kept  # freeing results is not timed
    return cpu


def _fastest(forms: dict[str, Callable[[], Any]]) -> tuple[str, Callable[[], Any]]:
    """Choose the form with the shortest of a few calls."""
    if len(forms) == 1:
        return next(iter(forms.items()))
    best = {}
    for name, form in forms.items():
        side = Side()
        form()
        for _ in range(3):
            _time(side, form)
        best[name] = min(side.cpu_s)
    name = min(best, key=lambda n: best[n])
    return name, forms[name]


def largest_error(results: Iterable[Any], exact: Iterable[Any]) -> float:
    """Return the largest difference as a part of the largest magnitude, over all results.

    It is infinite where shapes differ, and nan stays nan.
    """
    worst = 0.0
    for a, b in zip(results, exact, strict=True):
        if a.shape != b.shape:
            return math.inf
        difference = float((a.double() - b).abs().max())
        scale = float(b.abs().max())
        error = difference / scale if scale else (0.0 if difference == 0 else math.inf)
        if not error <= worst:
            worst = error
    return worst


# ------------------------------------------------------------------------------------------------ the machine


def _peaks() -> dict[str, float]:
    from peak import memory_rate, register_loop

    loop = register_loop()
    return {"flops": loop.rate() if loop is not None else 0.0, "bytes": memory_rate()}


def _best(before: dict[str, float], after: dict[str, float], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Take the higher of two measurements, and without a compiler the best rate of any matrix product seen."""
    peaks: dict[str, Any] = {key: max(before[key], after[key]) for key in before}
    peaks["source"] = "multiply-adds in registers"
    if not peaks["flops"]:
        peaks["flops"] = max(
            (o.flops / min(o.ours.median, o.theirs.median) for o in outcomes if o.measured), default=math.nan
        )
        peaks["source"] = "the best product seen, for want of g++"
    return peaks


def _machine(arguments: argparse.Namespace) -> dict[str, str]:
    return {
        "cpu": processor(sorted(os.sched_getaffinity(0))),
        "versions": f"{system()}, {versions('torch', 'apache-tvm', 'penstock')}",
        "calls": f"at least {arguments.repeats} of each side, in turn; median of processor time",
        "load before": load(),
    }


# ------------------------------------------------------------------------------------------------ reporting


def report(outcomes: Sequence[Outcome], peaks: dict[str, Any]) -> None:
    """Print the table, then its summary."""
    heads = ["row", "unit", "ours", "torch", "ratio", "wall", "of peak", "error", "torch's", "build s", "torch's form"]
    lines = [heads, *(_line(o, peaks) for o in outcomes)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        print(
            "  ".join(
                c.ljust(w) if i in (0, 1, len(heads) - 1) else c.rjust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
        )
    print(
        f"\npeak of one core: {peaks['flops'] / 1e9:.1f} GFLOP/s ({peaks['source']}), {peaks['bytes'] / 1e9:.1f} GB/s "
        "(streaming)"
    )
    good = [o for o in outcomes if not o.failure]
    for family in dict.fromkeys(o.family for o in outcomes):
        ours = [o.ratio for o in good if o.family == family]
        failed = sum(o.family == family and bool(o.failure) for o in outcomes)
        print(
            f"{family:<14} {len(ours):>2} rows, geometric mean {_mean(ours)}" + (f", {failed} failed" if failed else "")
        )
    print(f"{'all':<14} {len(good):>2} rows, geometric mean {_mean([o.ratio for o in good])}")
    slow = sorted((o for o in good if o.ratio < SLOW), key=lambda o: o.ratio)
    print(f"\n{len(slow)} of {len(good)} rows below {SLOW}x torch" + (":" if slow else ""))
    for o in slow:
        print(f"  {o.ratio:.3f}  {o.name}")
    failed_rows = [o for o in outcomes if o.failure]
    print(f"{len(failed_rows)} of {len(outcomes)} rows FAILED" + (":" if failed_rows else ""))
    for o in failed_rows:
        print(f"  {o.name}: {o.failure}")


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.3f}x torch" if ratios else "-"


def _line(o: Outcome, peaks: dict[str, Any]) -> list[str]:
    if not o.measured:
        return [o.name, "-", "FAILED", *["-"] * 5, "-", _number(o.build_s, ".2f"), o.failure[:60]]
    unit, peak = ("GFLOP/s", peaks["flops"]) if o.flops else ("GB/s", peaks["bytes"])
    wall = statistics.median(o.theirs.wall_s) / statistics.median(o.ours.wall_s)
    rates = [o.work / side.median for side in (o.ours, o.theirs)]
    return [
        o.name,
        unit,
        f"{rates[0] / 1e9:.1f}",
        f"{rates[1] / 1e9:.1f}",
        "FAILED" if o.failure else f"{o.ratio:.3f}",
        f"{wall:.3f}",
        f"{100 * rates[0] / peak:.0f}%",
        _number(o.ours.error, ".1e"),
        _number(o.theirs.error, ".1e"),
        _number(o.build_s, ".2f"),
        o.form,
    ]


def _number(x: float, form: str) -> str:
    return "-" if math.isnan(x) else format(x, form)


def _progress(o: Outcome) -> str:
    if not o.measured:
        return f"{o.name}: FAILED: {o.failure}"
    return f"{o.name}: {o.ratio:.3f}x torch ({o.ours.median * 1e3:.3f} and {o.theirs.median * 1e3:.3f} ms)" + (
        f" FAILED: {o.failure}" if o.failure else ""
    )


def _as_dict(o: Outcome) -> dict[str, Any]:
    """Convert an outcome to plain data; JSON has no nan."""
    fields = asdict(o) | ({"ratio": o.ratio} if o.measured else {})
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()} | {
        side: {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields[side].items()}
        for side in ("ours", "theirs")
    }


if __name__ == "__main__":
    sys.exit(main())
