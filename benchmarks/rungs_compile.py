"""The time to compile the code of a decoder for several rungs beside that for one, with an empty cache.

In: a decoder of random weights, written by transformers. Out: wall and processor seconds of a compile with one rung, and
with each of two ladders.

    python benchmarks/rungs_compile.py --results benchmarks/results/rungs_compile.json
    python benchmarks/rungs_compile.py --layers 2 --width 64 --rounds 1        in small

Every compile is a process of its own with an empty cache, and the machine is not measured first. The three take turns,
and medians of the rounds count. `ratio` is processor time by that of one rung of 256 tokens, which other work on the
machine disturbs least. The goal is at most 4 for nine rungs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import load, system, versions, write_json
from turns import in_turn

from penstock.support.terminal import table

# One rung, those that `compile --generate` takes, and nine.
LADDERS = {"one": (256,), "usual": (1, 4, 16, 64, 256), "nine": (1, 2, 4, 8, 16, 32, 64, 128, 256)}
CONTEXT = 1024


def main() -> None:
    """Compile all ladders in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--words", type=int, default=50257)
    parser.add_argument("--weights", default="f32", choices=("f32", "int8", "int4"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        print(json.dumps(compile_once(*arguments.compile, arguments.weights)))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-rungs-compile-") as scratch:
        folder = write_decoder(Path(scratch) / "model", arguments)
        times: dict[str, list[dict[str, float]]] = {name: [] for name in LADDERS}
        for _, name in in_turn(list(LADDERS), arguments.rounds):
            times[name].append(compiled_apart(folder, Path(scratch) / "bundle", name, arguments.weights))
            shutil.rmtree(Path(scratch) / "bundle")
            print(f"{name}: {times[name][-1]}", file=sys.stderr, flush=True)
    model = f"gpt2, {arguments.layers} layers of {arguments.width}"
    rows = rows_of(model, arguments.weights, times)
    if arguments.results:
        kept = json.loads(arguments.results.read_text())["rows"] if arguments.results.exists() else []
        done = {(row["model"], row["weights"]) for row in rows}
        rows = sorted([*[r for r in kept if (r["model"], r["weights"]) not in done], *rows], key=_order)
        about = {"system": system(), "load": load(), "versions": versions("torch", "transformers")}
        write_json(arguments.results, {"about": about, "rows": rows})
    print(table(*table_of(rows)))


def write_decoder(path: Path, sizes: argparse.Namespace) -> Path:
    """Write the folder of a GPT-2 with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"n_layer": sizes.layers, "n_embd": sizes.width, "n_head": max(sizes.width // 64, 1)}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), sizes.words - 1)
    config = AutoConfig.for_model("gpt2", **shape, n_positions=CONTEXT, vocab_size=sizes.words, **ends)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def compiled_apart(folder: Path, out: Path, ladder: str, weights: str) -> dict[str, float]:
    """Compile in a process of its own with an empty cache."""
    command = [sys.executable, __file__, "--compile", str(folder), str(out), ladder, "--weights", weights]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PENSTOCK_CACHE": cache, "OMP_NUM_THREADS": "1", "PENSTOCK_RATES": "assumed"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def compile_once(folder: str, out: str, ladder: str, weights: str) -> dict[str, float]:
    """Compile in this process, as `penstock compile` does, with the rungs of a ladder. Return its seconds."""
    from penstock.commands.parser import main as penstock
    from penstock.planning.decoding import folder as decoding

    decoding.RUNGS = LADDERS[ladder]
    began = time.perf_counter()
    words = ["compile", f"hf:{folder}", "-o", out, "--generate", "--context", str(CONTEXT), "--sequences", "1"]
    code = penstock([*words, *([] if weights == "f32" else ["--weights", weights])])
    if code:
        raise SystemExit(code)
    wall = time.perf_counter() - began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"wall_s": wall, "processor_s": sum(one.ru_utime + one.ru_stime for one in used)}


def rows_of(model: str, weights: str, times: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each ladder: medians, and processor time by that of one rung."""
    medians = {
        name: {what: statistics.median(run[what] for run in runs) for what in runs[0]} for name, runs in times.items()
    }
    by = medians["one"]["processor_s"]
    return [
        {"model": model, "weights": weights, "rungs": len(LADDERS[name]), **mine, "ratio": mine["processor_s"] / by}
        for name, mine in medians.items()
    ]


def _order(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["model"], row["weights"], row["rungs"]


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a table of all ladders: the head and the lines."""
    lines = [
        (
            row["model"],
            row["weights"],
            str(row["rungs"]),
            f"{row['wall_s']:.1f}",
            f"{row['processor_s']:.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in rows
    ]
    return ("model", "weights", "rungs", "wall s", "processor s", "ratio"), lines


if __name__ == "__main__":
    main()
