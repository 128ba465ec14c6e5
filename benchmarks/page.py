"""The result of run.py as Markdown: the page that a run prints.

In: the result. Out: Markdown by the names of PARTS. Tables are those of the scripts, with their figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from goals import TRAINING, goals
from machine import markdown

COMMITTED = Path(__file__).resolve().parent / "results" / "full.json"
MIB = 2**20


def page(result: dict[str, Any]) -> str:
    return "# Results\n\n" + "\n".join(f"## {name.capitalize()}\n\n{part(result)}" for name, part in PARTS.items())


def committed_part(name: str) -> str:
    """Return a part of the page of the committed run."""
    return PARTS[name](json.loads(COMMITTED.read_text(encoding="utf-8")))


def _machine(result: dict[str, Any]) -> str:
    rows = [[name, fact] for name, fact in result["machine"].items()]
    sections = [
        [name, f"{section['seconds']:.0f}", section["load before"].split()[0], section["load after"].split()[0]]
        for name, section in result["sections"].items()
    ]
    commands = "\n".join(section["command"] for section in result["sections"].values())
    heads = ["section", "seconds", "load before", "after"]
    return f"{markdown(['of', 'is'], rows)}\n\n{markdown(heads, sections)}\n\n```sh\n{commands}\n```\n"


def _goals(result: dict[str, Any]) -> str:
    lines = [
        [goal.name, goal.wanted, goal.measured, "reached" if goal.reached else "**missed**"] for goal in goals(result)
    ]
    return markdown(["goal", "wanted", "measured", ""], lines) + "\n"


def _of(section: str) -> Callable[[Callable[[Any], str]], Callable[[dict[str, Any]], str]]:
    """Make a decorator for a part about one section. If the section did not run or failed, the part says that."""

    def around(part: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
        def write(result: dict[str, Any]) -> str:
            entry = result["sections"].get(section)
            if entry is None:
                return "Not measured in this run.\n"
            if "said" in entry["found"]:
                return (
                    f"Failed with exit code {entry['exit']}:\n\n```text\n"
                    + "\n".join(entry["found"]["said"])
                    + "\n```\n"
                )
            failed = f"\nThe exit code was {entry['exit']}.\n" if entry["exit"] else ""
            return part(entry["found"]) + failed

        return write

    return around


def _training(result: dict[str, Any]) -> str:
    from training import far_apart, rows_of

    facts = [f"* {name}: {result['facts'][name]}" for name in ("model", "data", "turns", "peak", "work")]
    apart = far_apart(result)
    tried = [
        [
            name,
            form,
            f"{row['seconds']:.2f}",
            " + ".join(f"{peak / MIB:.0f}" for peak in row["peak_bytes"].values()),
            f"{apart[form]:.0e}",
        ]
        if "seconds" in row
        else [name, form, f"failed: {row['error']}", "", ""]
        for name, forms in result["tried"].items()
        for form, row in forms.items()
    ]
    text = "\n".join(facts) + "\n\n" + markdown(*rows_of(result)) + "\n"
    if tried:
        heads = ["contender", "form", "s per step", "peak MiB per process", "losses differ by"]
        text += "\nForms, each tried alone:\n\n" + markdown(heads, tried) + "\n"
    differences = ", ".join(f"{name} {apart[name]:.0e}" for name in result["contenders"] if name in apart)
    text += f"\nThe largest relative difference of losses from {next(reversed(result['contenders']))}'s: {differences}."
    return text + "".join(f" {name} did not take part: {reason}." for name, reason in result["absent"].items()) + "\n"


@_of("inference")
def _inference(result: dict[str, Any]) -> str:
    others = ("onnxruntime", "openvino", "torch", "torch.compile")
    lines = []
    for row in result["rows"]:
        seconds = {name: statistics.median(side["turn_s"]) for name, side in row["contenders"].items()}
        share = 100 * row["gflop"] * 1e9 / seconds["penstock"] / result["peak_flops"] if result["peak_flops"] else None
        cells = [
            row["model"].removesuffix("-infer"),
            f"{seconds['penstock'] * 1e3:.1f}",
            f"{share:.0f} %" if share else "-",
        ]
        for name in others:
            cells += (
                [f"{seconds[name] * 1e3:.1f}", f"{seconds[name] / seconds['penstock']:.2f}"]
                if name in seconds
                else ["-", "-"]
            )
        lines.append([*cells, f"{max(side['error'] for side in row['contenders'].values()):.0e}"])
    heads = [
        "model",
        "Penstock, ms",
        "of peak",
        *(head for name in others for head in (f"{name}, ms", "ratio")),
        "largest error",
    ]
    absent = sorted({f"{name}: {reason}" for row in result["rows"] for name, reason in row["absent"].items()})
    said = "".join(f"\nLeft out, {line}.\n" for line in absent)
    return f"{result['threads']} threads each; {result['facts']['turns']}.\n\n{markdown(heads, lines)}\n{said}"


@_of("compiling")
def _compiling(result: dict[str, Any]) -> str:
    phases = ("import", "frontend", "passes", "lowering", "kernels", "link", "bundle")

    def middle(rows: Sequence[dict[str, Any]], key: str) -> str:
        return f"{statistics.median(row[key] for row in rows):.2f}"

    lines = [
        [state, *(middle(rows, key) for key in ("total", *phases, "processor"))]
        for state, rows in result["states"].items()
    ]
    text = markdown(["training, two stages", "total s", *phases, "processor s"], lines) + "\n"
    others = [
        [what, name, f"{row['seconds']:.1f}", f"{row['processor']:.1f}"]
        for what in ("training", "inference")
        for name, row in result.get(what, {}).items()
    ]
    return text + ("\n" + markdown(["what", "compiled by", "seconds", "processor s"], others) + "\n" if others else "")


@_of("planner")
def _planner(result: dict[str, Any]) -> str:
    from planner import HEADS, cells

    return markdown(HEADS, [cells(row) for row in result["rows"]]) + "\n"


@_of("kernels")
def _kernels(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        if row.get("ratio") is None or row["failure"]:
            lines.append([row["name"], "-", "-", "-", f"failed: {row['failure']}"])
            continue
        unit, work, peak = ("GFLOP/s", row["flops"], "flops") if row["flops"] else ("GB/s", row["moved"], "bytes")
        rates = [work / row[side]["cpu_s"] for side in ("ours", "theirs")]
        share = f"{100 * rates[0] / result['peaks'][peak]:.0f} %"
        lines.append([row["name"], *(f"{rate / 1e9:.1f} {unit}" for rate in rates), share, f"{row['ratio']:.2f}"])
    ratios = [row["ratio"] for row in result["rows"] if row.get("ratio") and not row["failure"]]
    mean = f"\nGeometric mean of {len(ratios)} rows: {statistics.geometric_mean(ratios):.2f}.\n" if ratios else ""
    return markdown(["kernel", "Penstock", "torch", "of peak", "ratio"], lines) + "\n" + mean


@_of("transport")
def _transport(result: dict[str, Any]) -> str:
    from transport import cells_of

    return (
        markdown(
            ["part", "message", "shared memory", "over gloo", "gloo alone", ""],
            [cells_of(line) for line in result["lines"]],
        )
        + "\n"
    )


@_of("report")
def _report(result: dict[str, Any]) -> str:
    lines = []
    for name, figures in result.items():
        if isinstance(figures, dict):
            load = f"{figures['opened']['load']:.0f} ms" if "opened" in figures else "no browser"
            lines.append(
                [
                    name,
                    figures["operations"],
                    f"{figures['gather']:.2f}",
                    f"{figures['render']:.2f}",
                    f"{figures['bytes'] / 1e6:.2f}",
                    load,
                ]
            )
    return markdown(["program", "operations", "gather s", "render s", "MB", "opened in"], lines) + "\n"


@_of("startup")
def _startup(result: dict[str, Any]) -> str:
    from startup import table_of, table_of_jobs

    return f"{markdown(*table_of(result['rows']))}\n\n{markdown(*table_of_jobs(result['jobs']))}\n"


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "machine": _machine,
    "goals": _goals,
    **{section: _of(section)(_training) for _, section, *_ in TRAINING},
    "inference": _inference,
    "compiling": _compiling,
    "planner": _planner,
    "kernels": _kernels,
    "transport": _transport,
    "report": _report,
    "startup": _startup,
}
