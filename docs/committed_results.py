"""The parts of pages that come from committed runs: benchmarks/results, and verdicts and cells among the tests.

In: files that benchmarks and slow tests wrote. Out: tables for docs/refresh.py, each made by the code that wrote the
file, so that a page and a terminal show the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent


def parts() -> dict[str, Callable[[], str]]:
    """All parts by name."""
    return {
        "zero-matrix": matrix_of_levels,
        **results(),
        "failure-trials": failure_trials,
        "long-run": long_run,
        "small-models": committed_table("one_process"),
        "sizes-beside-exact": committed_table("rungs"),
        "sizes-bounded": committed_table("rungs", "steps"),
        "rungs-compiled": committed_table("rungs_compile"),
        "split-training": committed_table("tensor_parallel"),
        "collective-times": committed_table("collectives"),
        "shared-out": committed_table("zero"),
        "gradient-bytes": committed_table("gradient_bytes"),
        "sums-behind": committed_table("sums_behind"),
        "beyond-memory-parts": committed_table("beyond_memory_parts"),
        "packs-timed": committed_table("schedules", run="packs_timed"),
        "packs-timed-short": committed_table("schedules", run="packs_timed_short"),
        "fates-timed": committed_table("schedules", run="fates_timed"),
        "schedule-path": committed_table("schedule_path"),
        "updates-timed": committed_table("update_on"),
        "updates-losses": committed_table("update_on", "losses"),
        "updates-beside": committed_table("zero", run="updates_beside"),
        "weights-wrapped": committed_table("wrapped"),
        "packs-beside-torch": committed_table("interleaved", "schedules"),
        "beyond-memory": committed_table("beyond_memory"),
        "under-budgets": under_budgets,
        "under-budgets-xeon": partial(under_budgets, "budgets_xeon"),
        "saved-memory": committed_table("saved_memory"),
        "export-verdicts": export_verdicts,
        "exported-models": partial(exported_models, "beside_onnxruntime"),
        "quantised-models": partial(exported_models, "quantised_onnx"),
        "generation-rates": partial(generation_rates, "generation"),
        "generation-genai": partial(generation_rates, "generation-genai"),
        "generation-xeon": partial(generation_rates, "generation-xeon"),
        "generation-prompts": partial(generation_rates, "generation-prompts"),
        "attention-over-caches": committed_table("attend"),
        "joint-plans": committed_table("joint_plans"),
        "chosen-teams": committed_table("chosen_teams"),
        "plans-held-back": partial(plans_run, "held_back"),
        "plans-best-of-all": partial(plans_run, "best_of_all"),
        "memory-held-back": memory_of_plans,
        "planned-unequal": committed_table("planner", "unequal"),
        "planned-equal": committed_table("planner", "equal"),
        "planned-packs": committed_table("planner", "packs"),
        "large-folder": committed_table("large_folder"),
        "step-accounts": step_accounts,
    }


def results() -> dict[str, Callable[[], str]]:
    """The parts of the results page, made of the committed run."""
    # Behind everything else: some of its modules have names that tests have, too.
    sys.path.append(str(HERE.parent / "benchmarks"))
    from page import PARTS, committed_part

    return {f"results-{name}": partial(committed_part, name) for name in PARTS}


def failure_trials() -> str:
    """What the committed trials of failures found, and the committed long run."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    from failure_tables import trials_table

    return trials_table()


def long_run() -> str:
    """What processes gained in the committed run of training and inference at once."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    from failure_tables import together_table

    return together_table()


def under_budgets(name: str = "budgets") -> str:
    """What plans under budgets of memory were chosen, predicted and measured to take in a committed run."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    from budgets import table_of, table_of_verdict
    from machine import markdown

    document = json.loads((HERE.parent / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    tables = [markdown(*make(document["rows"])) for make in (table_of_verdict, table_of)]
    return "\n\n".join([f"* {'; '.join(document['machine'])}", *tables]) + "\n"


def plans_run(name: str) -> str:
    """What plans for drawn clusters were chosen, predicted and measured to take in the committed cells."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    benchmark = import_module(name)
    from machine import markdown

    document = json.loads((HERE.parent / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    facts, rows = document["facts"], document["rows"]
    shown = [f"* {facts['system']}; {facts['processor']}", f"* {benchmark.verdict(rows)}", ""]
    return "\n".join([*shown, markdown(*benchmark.table_of(rows))]) + "\n"


def memory_of_plans() -> str:
    """How far predicted memory of the chosen plans of held-back clusters is off, and the cells over the goal."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    import held_back_memory as benchmark
    from machine import markdown

    path = HERE.parent / "benchmarks/results/held_back_memory.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    facts, rows, beside = document["facts"], document["rows"], document["beside"]
    over = [row for row in rows if benchmark.is_over(row, beside)]
    shown = [f"* {facts['system']}; {facts['processor']}", f"* {benchmark.verdict(rows, beside)}", ""]
    return "\n".join([*shown, markdown(*benchmark.table_of(over, beside))]) + "\n"


def export_verdicts() -> str:
    """The committed verdicts on exports of other libraries, counted by library."""
    folder = HERE.parent / "tests" / "models"
    sys.path.append(str(folder))
    from export_list import EXPORTS

    document = json.loads((folder / "exports.json").read_text())
    families: dict[str, dict[str, str]] = document["families"]
    words = ("ok", "cannot tell", "FAILED", "not imported")
    lines = [
        "| library | families | seeds | verdicts | ok | cannot tell | failed | not imported |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for library in ("timm", "torchvision", "transformers"):
        mine = [families[name] for name, export in EXPORTS.items() if export.library == library]
        answers = [answer for one in mine for answer in one.values()]
        seeds = {key.split()[0] for one in mine for key in one}
        counts = [len(mine), len(seeds), len(answers), *(answers.count(word) for word in words)]
        lines.append(f"| {library} | {' | '.join(map(str, counts))} |")
    found, none = (sum(line.startswith(word) for line in document["faults"]) for word in ("found", "no effect"))
    shown = len(document["faults"]) - none
    lines += ["", f"Faults in the compiled code of these exports: {shown} with an effect, {found} of them found."]
    return "\n".join(lines) + "\n"


def committed_table(benchmark: str, part: str = "rows", run: str = "") -> Callable[[], str]:
    """Return what makes the table of a part of a benchmark's committed run, by its `table_of` or `table_of_PART`. A run
    that has not the name of its benchmark is named."""
    maker = "table_of" if part == "rows" else f"table_of_{part}"

    def make() -> str:
        sys.path.append(str(HERE.parent / "benchmarks"))
        from machine import markdown

        document = json.loads((HERE.parent / f"benchmarks/results/{run or benchmark}.json").read_text(encoding="utf-8"))
        return markdown(*getattr(import_module(benchmark), maker)(document[part])) + "\n"

    return make


def exported_models(run: str) -> str:
    """What exported models took beside onnxruntime in a committed run."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    from beside_onnxruntime import means_of, table_of
    from machine import markdown

    document = json.loads((HERE.parent / f"benchmarks/results/{run}.json").read_text(encoding="utf-8"))
    sentences = [f"* {sentence}." for sentence in means_of(document["rows"])]
    return "\n".join([markdown(*table_of(document["rows"])), "", *sentences]) + "\n"


def generation_rates(run: str) -> str:
    """How fast text was generated beside others in a committed run."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    from generation import table

    document = json.loads((HERE.parent / f"benchmarks/results/{run}.json").read_text(encoding="utf-8"))
    return table(document["results"]) + "\n"


def step_accounts() -> str:
    """Where the time of a training step went in the committed runs, model by model."""
    sys.path.append(str(HERE.parent / "benchmarks"))
    from machine import markdown
    from step_account import table_of

    parts = []
    for path in sorted((HERE.parent / "benchmarks/results").glob("step_account-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        facts = [f"* {key}: {document['facts'][key]}" for key in ("model", "data", "peak")]
        parts.append("\n".join([*facts, "", markdown(*table_of(document))]))
    return "\n\n".join(parts) + "\n"


def matrix_of_levels() -> str:
    """How the committed cells of schedules, levels, split tensors and recomputation compared."""
    sys.path += [str(HERE.parent / "benchmarks"), str(HERE.parent / "tests" / "acceptance" / "sharding")]
    from machine import markdown
    from matrix import FILE, refusals, table_of

    rows = json.loads(FILE.read_text(encoding="utf-8"))
    words = [f"\nRefused, in these words: {text}." for text in refusals(rows)]
    return "\n".join([markdown(*table_of(rows)), *words]) + "\n"
