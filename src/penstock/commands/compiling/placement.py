"""`penstock plan --workload FILE.json`: place the graph of a file in the public device-placement format.

Out: the best placement that the search reached, and how far from the optimum it can be. It comes with the load of every
device and its nodes, by the ids of the file. A file that has options of layers by tensor parallel degree goes to
joint.py.
"""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from typing import TYPE_CHECKING

from penstock.support.errors import UsageError
from penstock.support.terminal import PATIENCE, Progress, say, table, terminal_width
from penstock.support.words import shown_bytes

from . import joint

if TYPE_CHECKING:
    from penstock.passes.placement.problem import Placement
    from penstock.passes.placement.workload import Workload

# A gap of a millionth counts as proof of an optimum.
PROVEN = 2e-6
_OWN = ("workload", "objective", "contiguous", "any")


def check(arguments: Namespace) -> None:
    """Raise UsageError unless a plan is one of a model or one of a workload."""
    flags = [f"--{name}" for name in _OWN if name != "objective" and getattr(arguments, name)]
    if arguments.workload is None:
        if flags:
            raise UsageError(f"{', '.join(flags)} without --workload", hint="these are for placement files")
        if arguments.model is None:
            raise UsageError("nothing to plan: give MODEL.onnx, or --workload FILE.json")
        return
    if arguments.model is not None:
        raise UsageError(f"{arguments.model} and --workload {arguments.workload}: a plan is for one of the two")
    foreign = [f"--{name.replace('_', '-')}" for name in arguments.given if name not in (*_OWN, "json")]
    if foreign:
        raise UsageError(
            f"{', '.join(sorted(foreign))} with --workload: these are for models; the file says which devices there are"
        )
    if arguments.any and arguments.objective == "latency":
        raise UsageError(
            "--any with --objective latency: an accelerator takes one contiguous set and runs it as one call"
        )


def run(arguments: Namespace) -> None:
    """Place the graph of a file, and print where its nodes are."""
    from penstock.passes.placement.contiguous import split_contiguously  # lazy: heavy
    from penstock.passes.placement.free import split_freely  # lazy: heavy
    from penstock.passes.placement.joint.reading import are_profiles  # lazy: heavy
    from penstock.passes.placement.latency import place_for_latency  # lazy: heavy
    from penstock.passes.placement.workload import load_json, read_workload  # lazy: heavy

    data = load_json(arguments.workload)
    if are_profiles(data):
        joint.run(arguments, data)
        return
    workload = read_workload(data, arguments.workload)
    line = Progress("plan", after=PATIENCE)

    def progress(done: int, total: int, what: str) -> None:
        """Show how far a search is. Searches follow each other, so none of them ends the line."""
        line(min(done, total - 1), total, what)

    objective = arguments.objective or "throughput"
    if objective == "latency":
        placement = place_for_latency(workload.problem, progress=progress)
    elif arguments.any:
        placement = split_freely(workload.problem, progress=progress)
    else:
        placement = split_contiguously(workload.problem, progress=progress)
    line.close()
    if arguments.json:
        print(json.dumps(as_json(workload, placement, objective, not arguments.any)))
    else:
        print(as_text(workload, placement, objective, not arguments.any))
        for note in placement.notes:
            say(note)


def as_json(workload: Workload, placement: Placement, objective: str, contiguous: bool) -> dict[str, object]:
    """Return all of a placement; times and bytes in the units of the file."""
    from penstock.passes.placement.problem import loads  # lazy: heavy

    problem, optimal = placement.problem, placement.gap <= PROVEN
    rows = [
        {
            "name": name,
            "load": row.total,
            "transfer": row.transfer,
            "memory": row.memory,
            "nodes": _nodes(workload, placement, d),
        }
        for d, (name, row) in enumerate(zip(problem.device_names(), loads(problem, placement.device_of), strict=True))
    ]
    about = {
        "objective": objective,
        "contiguous": contiguous,
        "value": placement.value,
        "bound": placement.bound,
        "gap": placement.gap,
        "optimal": optimal,
    }
    return about | {"devices": rows, "notes": list(placement.notes)}


def as_text(workload: Workload, placement: Placement, objective: str, contiguous: bool) -> str:
    """Return a line with the value of a placement, a table of devices, and the nodes of each."""
    from penstock.passes.placement.problem import loads  # lazy: heavy

    problem, names = placement.problem, placement.problem.device_names()
    what = (
        "latency of one sample"
        if objective == "latency"
        else f"largest load, {'contiguous' if contiguous else 'any split'}"
    )
    sure = (
        "the optimum"
        if placement.gap <= PROVEN
        else f"at most {placement.gap:.2%} above the optimum, which is at least {placement.bound:.9g}"
    )
    rows = loads(problem, placement.device_of)
    if objective == "latency":
        header, cells = _calls(placement)
    else:
        header = ["device", "nodes", "load", "of which transfers", "share", "memory"]
        cells = [
            [
                name,
                row.nodes,
                f"{row.total:.9g}",
                f"{row.transfer:.9g}",
                f"{row.total / placement.value:.0%}" if placement.value else "-",
                shown_bytes(row.memory),
            ]
            for name, row in zip(names, rows, strict=True)
        ]
    width = terminal_width() or 140
    lists = []
    for d, name in enumerate(names):
        nodes = " ".join(map(str, _nodes(workload, placement, d))) or "nothing"
        lists.append(textwrap.fill(f"{name}: {nodes}", width, subsequent_indent="    ", break_long_words=False))
    return "\n".join([f"{what}: {placement.value:.12g}, {sure}", table(header, cells), *lists])


def _calls(placement: Placement) -> tuple[list[str], list[list[object]]]:
    """Return the times when each accelerator runs, as rows; CPU nodes run one by one, as many at once as there are to
    run."""
    from penstock.passes.placement.calls import ends  # lazy: heavy

    times = ends(placement.problem, placement.device_of)
    assert times is not None
    kinds, cells = placement.problem.devices, []
    for d, name in enumerate(placement.problem.device_names()):
        mine = [times[n] for n, device in enumerate(placement.device_of) if device == d]
        memory = sum(
            node.memory
            for node, device in zip(placement.problem.nodes, placement.device_of, strict=True)
            if device == d
        )
        if placement.problem.kinds[kinds[d]].pays_transfers or mine:
            begin, end = (f"{min(b for b, _ in mine):.9g}", f"{max(e for _, e in mine):.9g}") if mine else ("-", "-")
            cells.append([name, len(mine), begin, end, shown_bytes(memory)])
    return ["device", "nodes", "first start", "last end", "memory"], cells


def _nodes(workload: Workload, placement: Placement, device: int) -> list[int]:
    return sorted(number for number, d in zip(workload.ids, placement.device_of, strict=True) if d == device)
