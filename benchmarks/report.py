"""The cost of the report of a training program: to make, in bytes, and to open in a headless Chromium.

    python benchmarks/report.py                         a GPT-2-small-shaped program of two stages, then a deep one
    python benchmarks/report.py --layers 2 --width 64 --heads 4 --vocab 512 --positions 64 --deep 0

The program is planned, and compiled with `--backend tvm` (the sources of its kernels are most of the data) with a dump;
nothing is trained. Rows:

    gather, render   seconds: facts from modules in memory, as for `index.html` of a dump folder; and facts into a page
    compile          seconds of planning and compiling with an empty cache, including a dump and that page
    bytes            of the page and of its parts
    load             milliseconds from the request for the page until it says that it is ready, median of the rounds
    first paint      milliseconds until the browser has shown part of the page (first contentful paint), median
    open VIEW        milliseconds until a view opened for the first time is complete; the graph also with all blocks
                     open

`--deep N` plans a second GPT with N layers (25: some 5000 operations), without kernels' sources, for the pictures of
large graphs. Limits are 5 MB and 2 s: the exit code says whether they are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "inspection" / "report"))

import chromium
from machine import write_json

import penstock as ps
from penstock.inspection.dump import Dump
from penstock.inspection.report.facts import gather
from penstock.inspection.report.material import Material, PassStep
from penstock.inspection.report.page import page_of, render
from penstock.models import write_gpt

LIMIT_BYTES, LIMIT_S = 5e6, 2.0
VIEWS = ("graph", "passes", "placement", "schedule", "memory", "links", "kernels")


def planned(folder: Path, layers: int, shape: dict[str, int], microbatches: int, dump: Dump) -> ps.Plan:
    path = folder / f"gpt{layers}.onnx"
    if not path.exists():
        write_gpt(path, layers=layers, batch=2, **shape)
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(), microbatches=microbatches)
    return ps.plan(ps.from_onnx(path), ps.Cluster.local(2), training, schedule="2bw", stages=2, dump=dump)


def opened(browser: chromium.Browser, page: Path, rounds: int) -> dict[str, float]:
    """Open the page, and return milliseconds."""
    loads, paints, milliseconds = [], [], {}
    for _ in range(rounds):
        browser.open(page)
        loads.append(browser.js("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"))
        # The entry comes some frames after the page is ready; without one the wait ends in an error.
        browser.wait("performance.getEntriesByName('first-contentful-paint').length > 0")
        paints.append(browser.js("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    milliseconds["load"], milliseconds["first paint"] = statistics.median(loads), statistics.median(paints)
    for name in VIEWS:
        milliseconds[f"open {name}"] = _took(browser, f"document.getElementById('tab-{name}').click()")
    milliseconds["open all blocks"] = _took(
        browser,
        "(document.getElementById('tab-graph').click(), [...document.querySelectorAll('#view-graph "
        "button')].find((b) => b.textContent === 'Open all').click())",
    )
    nodes = browser.js("document.querySelectorAll('#view-graph .node').length")
    assert not browser.complaints(), browser.complaints()
    return milliseconds | {"nodes": nodes}


def _took(browser: chromium.Browser, act: str) -> float:
    """Return milliseconds until the next frame has been laid out."""
    return float(
        browser.js(
            f"new Promise((done) => {{ const t = performance.now(); {act}; document.body.getBoundingClientRect(); "
            f"setTimeout(() => done(performance.now() - t)) }})"
        )
    )


def report_of(plan: ps.Plan, dump: Dump, page: Path) -> dict[str, Any]:
    """Make a page, and return seconds and bytes of it."""
    steps = tuple(PassStep(*row) for row in dump.passes)
    material = Material(plan.module, steps, plan.as_dict(), sources=dump.kernels, programs=dump.programs)
    begin = time.perf_counter()
    facts = gather(material, plain=True)
    middle = time.perf_counter()
    text = render(facts)
    end = time.perf_counter()
    page.write_text(text, encoding="utf-8")
    parts = {name: len(json.dumps(part, separators=(",", ":"))) for name, part in facts.items()}
    parts["sources"] = len(facts["kernels"]["sources"])
    return {
        "gather": middle - begin,
        "render": end - middle,
        "bytes": len(text.encode()),
        "parts": parts,
        "operations": facts["summary"]["operations"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = {"width": 768, "heads": 12, "vocab": 50257, "positions": 128}
    for name, usual in {"layers": 12, **shape, "microbatches": 8, "deep": 25, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--backend", choices=("tvm", "numpy"), default="tvm")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = {name: getattr(arguments, name) for name in shape}
        os.environ["PENSTOCK_CACHE"] = str(folder / "cache")
        dump, begin = Dump(folder / "dumps"), time.perf_counter()
        plan = planned(folder, arguments.layers, sizes, arguments.microbatches, dump)
        ps.compile(plan, folder / "bundle", backend=arguments.backend, dump=dump)
        result["compile"] = time.perf_counter() - begin
        pages = {f"{arguments.layers} layers": (folder / "page.html", report_of(plan, dump, folder / "page.html"))}
        if arguments.deep:
            dump = Dump(folder / "deep")
            plan = planned(
                folder,
                arguments.deep,
                {"width": 32, "heads": 2, "vocab": 64, "positions": 8},
                arguments.microbatches,
                dump,
            )
            page_of(Material(plan.module), plain=True)
            pages[f"{arguments.deep} layers"] = (folder / "deep.html", report_of(plan, dump, folder / "deep.html"))
        program = chromium.installed()
        for title, (page, figures) in pages.items():
            result[title] = figures
            if program is not None:
                with chromium.Browser(program) as browser:
                    figures["opened"] = opened(browser, page, arguments.rounds)
    return told(result, program, arguments.json)


def told(result: dict[str, Any], program: str | None, out: str | None) -> int:
    """Print all figures, and return 1 where a limit is not kept."""
    kept = True
    for title, figures in result.items():
        if not isinstance(figures, dict):
            print(f"{title}: {figures:.2f} s")
            continue
        kept &= figures["bytes"] <= LIMIT_BYTES
        print(
            f"{title}, {figures['operations']} operations: gather {figures['gather']:.3f} s, render "
            f"{figures['render']:.3f} s, {figures['bytes'] / 1e6:.2f} MB"
        )
        largest = sorted(figures["parts"].items(), key=lambda item: -item[1])[:6]
        print("    " + ", ".join(f"{name} {size / 1e3:.0f} kB" for name, size in largest))
        for name, value in figures.get("opened", {}).items():
            kept &= name != "load" or value <= LIMIT_S * 1e3
            print(f"    {name:<18} {value:8.0f}{'' if name == 'nodes' else ' ms'}")
    if program is None:
        print("no Chromium is installed: nothing was opened")
    print("limits kept" if kept else f"LIMITS NOT KEPT: {LIMIT_BYTES / 1e6:.0f} MB, {LIMIT_S:.0f} s")
    write_json(out, result)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
