"""`penstock simulate`: the program of a bundle or IR file, run against modelled times, links, NICs, cores and memory.

Times of computations come from the costs of passes/costs/prices.py, or from the table of what was measured on this
machine. They can also be measured for this run: each rank of the bundle by itself (calibration/rehearse.py).
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.arguments import add_settings, check_writable, settings_from
from penstock.support.errors import UsageError
from penstock.support.settings import POSITIVE, setting
from penstock.support.terminal import say, table
from penstock.support.words import counted, shown_bytes

if TYPE_CHECKING:
    from penstock.backends.bundle.format import Bundle
    from penstock.ir.cluster.cluster import Cluster
    from penstock.ir.graph import Module
    from penstock.passes.simulator.forecast import Forecast
    from penstock.passes.simulator.machine import Route
    from penstock.passes.simulator.simulate import Seconds


@dataclass(frozen=True)
class SimulateOptions:
    """Settings of a simulation. `latency` and `bandwidth` are those of all links, in place of the cluster's."""

    batches: int = setting(10, "batches to run (default: 10)", check=POSITIVE, shown="N")
    costs: str = setting(
        "analytic",
        "where times of computations come from: the rates of the cluster, what was measured on this machine before, "
        "or each rank of the bundle run by itself here (default: analytic)",
        choices=("analytic", "table", "measured"),
    )
    latency: float | None = setting(None, "seconds on all links, in place of the cluster's", read=float, shown="S")
    bandwidth: float | None = setting(
        None, "bytes per second of all links and NICs, in place of the cluster's", read=float, shown="X"
    )

    def check(self) -> None:
        """Raise UsageError where a number is none that a link may have."""
        if self.bandwidth is not None and not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise UsageError(f"--bandwidth must be a positive number, got {self.bandwidth:g}")
        if self.latency is not None and not (math.isfinite(self.latency) and self.latency >= 0):
            raise UsageError(f"--latency must be a number of 0 or more, got {self.latency:g}")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the program, its machine, and what is written."""
    parser.add_argument("file", metavar="BUNDLE|FILE.ir")
    parser.add_argument(
        "--cluster", metavar="FILE", help="other devices and links than those it was planned for, under the same names"
    )
    add_settings(parser, SimulateOptions)
    parser.add_argument("--gantt", metavar="FILE.svg", help="draw every rank's run, with memory over time")
    parser.add_argument("--trace", metavar="FILE.json", help="write a Chrome trace of every action")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")


def run(arguments: Namespace) -> None:
    """Simulate, and print when everything ran."""
    from penstock.inspection.subject import load_module  # lazy: heavy
    from penstock.ir.cluster.cluster import Cluster  # lazy: heavy
    from penstock.ir.files import verify_read  # lazy: heavy
    from penstock.passes.simulator.forecast import forecast  # lazy: heavy
    from penstock.passes.simulator.machine import Route  # lazy: heavy

    options = settings_from(SimulateOptions, arguments)
    check_writable({"--gantt": arguments.gantt, "--trace": arguments.trace})
    module = load_module(arguments.file)
    verify_read(module, arguments.file)
    if arguments.cluster:
        module = module.but(cluster=_other_cluster(module, Cluster.load(arguments.cluster)))
    if options.costs == "measured" and not Path(arguments.file).is_dir():
        raise UsageError(
            "only a bundle can be measured", where=arguments.file, hint="compile it, or use --costs analytic"
        )
    options.check()

    def change(route: Route) -> Route:
        speed, latency = options.bandwidth, options.latency
        shares = route.shares if speed is None else tuple((name, speed) for name, _ in route.shares)
        return Route(shares, route.latency if latency is None else latency)

    if module.schedule is None:
        raise UsageError(
            "has no schedule", where=arguments.file, hint="simulate needs a bundle, or a dump after `communicate`"
        )
    predicted = forecast(module, _times_of(module, Path(arguments.file), options.costs), options.batches, change)
    if arguments.gantt:
        from penstock.inspection.views.gantt import svg_gantt  # lazy: heavy

        Path(arguments.gantt).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.gantt).write_text(
            svg_gantt(predicted.simulated, f"{module.name}, {module.schedule.name}", predicted.curves()),
            encoding="utf-8",
        )
        say(f"wrote {arguments.gantt}")
    if arguments.trace:
        from penstock.runtime.telemetry.trace import write_trace  # lazy: heavy

        write_trace(
            Path(arguments.trace),
            [
                [(str(a), start, end) for a, start, end in predicted.simulated.timed(rank)]
                for rank in predicted.simulated.lines
            ],
        )
        say(f"wrote {arguments.trace}")
    if arguments.json:
        print(json.dumps(as_dict(predicted), indent=2))
    else:
        _print(predicted)


def _other_cluster(module: Module, cluster: Cluster) -> Cluster:
    known = {device.name for device in cluster.devices}
    missing = sorted({*module.rank_devices()} - known)
    if missing:
        raise UsageError(
            f"the cluster has no device {', '.join(missing)}, on which stages are",
            hint=f"it has {', '.join(sorted(known))}",
        )
    return cluster


def as_dict(predicted: Forecast) -> dict[str, Any]:
    """Return all that the table says, in seconds and bytes."""
    from penstock.ir.memory.predict import measure_memory  # lazy: heavy
    from penstock.passes.simulator.forecast import binding, share_of  # lazy: heavy

    simulated, memory = predicted.simulated, measure_memory(predicted.module)
    start, end, count = simulated.window
    return {
        "module": predicted.module.name,
        "schedule": simulated.schedule.name,
        "batches": simulated.batches,
        "step_s": simulated.step_seconds,
        "drained_s": predicted.drained,
        "finish_s": simulated.finish,
        "samples_per_s": predicted.samples / simulated.step_seconds if simulated.step_seconds else None,
        "window": {"from_s": start, "to_s": end, "batches": count},
        "ranks": [
            {**use._asdict(), "device": predicted.devices[use.rank], "peak_bytes": memory[use.rank].peak}
            for use in simulated.ranks
        ],
        "links": [
            {
                "name": use.name,
                "bandwidth": use.bandwidth,
                "bytes": use.nbytes,
                "busy_s": use.busy,
                "busy": share_of(use.busy, simulated.finish),
            }
            for use in simulated.links
        ],
        "critical_path": simulated.critical_path,
        "bound_by": binding(predicted),
    }


def _print(predicted: Forecast) -> None:
    from penstock.inspection.views.gantt import text_gantt  # lazy: heavy
    from penstock.ir.memory.predict import measure_memory  # lazy: heavy
    from penstock.passes.costs.prices import shown_seconds  # lazy: heavy
    from penstock.passes.simulator.forecast import binding, share_of  # lazy: heavy

    simulated, memory = predicted.simulated, measure_memory(predicted.module)
    schedule = simulated.schedule
    print(
        f"{predicted.module.name}: schedule {schedule.name}, {counted(schedule.microbatches, 'microbatch')} per "
        f"batch, {counted(simulated.batches, 'batch')} simulated"
    )
    step = simulated.step_seconds
    rows = [
        [
            u.rank,
            " ".join(map(str, predicted.module.rank_packs()[u.rank])),
            predicted.devices[u.rank],
            *(f"{share_of(s, u.busy + u.waiting + u.idle):.1%}" for s in (u.busy, u.waiting, u.idle)),
            shown_bytes(memory[u.rank].peak),
        ]
        for u in simulated.ranks
    ]
    print(table(["rank", "stage", "device", "busy", "waiting", "idle", "peak memory"], rows))
    if simulated.links:
        links = [
            [u.name, f"{u.nbytes / simulated.batches / 1e6:.3f}", f"{share_of(u.busy, simulated.finish):.1%}"]
            for u in simulated.links
        ]
        print(table(["link", "MB per batch", "busy"], links))
    print(
        text_gantt(simulated, until=simulated.ends[min(1, simulated.batches - 1)])
        if len(simulated.lines) <= 64
        else f"{len(simulated.lines)} ranks: --gantt draws them"
    )
    print(
        f"one batch takes {shown_seconds(step)} in steady state, {shown_seconds(predicted.drained)} by itself; "
        f"{predicted.samples / step:.1f} samples/s"
        if step
        else "takes no time"
    )
    print(f"bound by: {binding(predicted)}")
    total = sum(simulated.critical_path.values())
    parts = [f"{what} {share_of(spent, total):.0%}" for what, spent in list(simulated.critical_path.items())[:5]]
    print(f"critical path: {', '.join(parts)}")


def _times_of(module: Module, source: Path, costs: str) -> Seconds:
    """Return the times of actions by the source that `costs` names.

    `analytic` is passes/costs/prices.py with the rates of the cluster. `table` is what was measured on this machine
    before, where it was. `measured` is every rank of a bundle, measured one after another for this call, which also
    goes into the table.
    """
    from penstock.passes.simulator.forecast import seconds_of  # lazy: heavy

    return seconds_of(module, _computations(module, source, costs))


def _computations(module: Module, source: Path, costs: str) -> dict[tuple[int, str], float]:
    if costs == "measured":
        from penstock.backends.bundle.format import open_bundle  # lazy: heavy
        from penstock.calibration.profile import profile  # lazy: heavy
        from penstock.calibration.rehearse import rehearse  # lazy: heavy

        def shown(bundle: Bundle, ranks: list[int]) -> list[dict[str, float]]:
            for rank in ranks:
                say(f"measuring rank {rank} of {bundle.world_size} by itself, threads: {bundle.rank(rank).threads}")
            return rehearse(bundle, ranks)

        return profile(open_bundle(source), shown, anew=True)
    if costs == "table":
        from penstock.backends.bundle.format import open_bundle  # lazy: heavy
        from penstock.calibration.measured import Measured, stage_times  # lazy: heavy

        backend = open_bundle(source).manifest.backend if source.is_dir() else "tvm"
        times, estimates = stage_times(module, Measured(backend))
        if estimates:
            say(f"{estimates} of {len(times)} times are not in the table and are estimated")
        return times
    from penstock.passes.costs.prices import rank_seconds  # lazy: heavy

    return rank_seconds(module)
