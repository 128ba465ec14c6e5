"""The time of `penstock inspect`, view by view: seconds of a fresh process, and the heavy libraries that it loads.

    python benchmarks/looking.py   GPT-2 small on two stages, 600 MB of weights: a minute
    python benchmarks/looking.py --layers 2 --width 64 --heads 2 --vocab 512 --positions 16

The bundle is of the NumPy back end, which has no machine code to hash; TVM adds some MB. Each view runs `--rounds`
times; the median counts. The first round of all finds the bundle in the page cache, as it was just written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import markdown, write_json

from penstock.commands.parser import main as penstock
from penstock.models import write_gpt

VIEWS = {
    "summary": (),
    "--schedule": ("--schedule",),
    "--memory": ("--memory",),
    "--kernels": ("--kernels",),
    "--flow s0.F": ("--flow", "s0.F"),
    "--params": ("--params",),
    "--why": ("--why", "h.0.attn.residual"),
    "--export .dot": ("--export", "{folder}/model.dot"),
    "--export .csv": ("--export", "{folder}/schedule.csv"),
}
HEAVY = ("torch", "tvm", "onnx", "onnxruntime")
# Help ends the process from within.
_CODE = """
import json, sys
from penstock.commands.parser import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print('\\0' + json.dumps([code, [name for name in {heavy!r} if name in sys.modules]]))
"""


def look(words: Sequence[str]) -> tuple[float, list[str]]:
    """Run one command in a process of its own, and return its seconds and the heavy libraries it loaded."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", _CODE.format(heavy=HEAVY), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, env=os.environ | {"COLUMNS": "160"}
    )
    seconds = time.perf_counter() - begin
    code, loaded = json.loads(done.stdout.rpartition("\0")[2])
    assert not code, done.stderr
    return seconds, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, default in (
        ("layers", 12),
        ("width", 768),
        ("heads", 12),
        ("vocab", 50257),
        ("positions", 128),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", metavar="FILE", help="write every time")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape = {name: getattr(options, name) for name in ("layers", "width", "heads", "vocab", "positions")}
        write_gpt(folder / "gpt.onnx", **shape)
        compiling = (
            f"compile {folder}/gpt.onnx -o {folder}/bundle --devices 2 --dim batch=1 --loss cross_entropy --optimizer "
            "adamw --lr 0.001"
        )
        assert penstock([*compiling.split(), "--microbatches", "4", "--schedule", "2bw", "--backend", "numpy"]) == 0
        size = sum(path.stat().st_size for path in (folder / "bundle").rglob("*") if path.is_file())
        for name, flags in VIEWS.items():
            words = ["inspect", str(folder / "bundle"), *(flag.format(folder=folder) for flag in flags)]
            runs = [look(words) for _ in range(options.rounds)]
            rows.append({"view": name, "seconds": [seconds for seconds, _ in runs], "loaded": runs[0][1]})
    print(f"\nbundle of {size / 1e6:.0f} MB, {options.rounds} processes each\n")
    lines = [[row["view"], f"{statistics.median(row['seconds']):.2f}", ", ".join(row["loaded"]) or "-"] for row in rows]
    print(markdown(["view", "seconds", "loaded"], lines))
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
