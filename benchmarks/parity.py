"""A character model of this project's documentation, trained by 1f1b and by 2bw: the cost of one update's delay.

    python benchmarks/parity.py  all rows: a quarter of an hour on one core
    python benchmarks/parity.py --optimizers adamw:3e-3 --seeds 2                        some of them
    python benchmarks/parity.py --json a.json --markdown docs/weight-versions.md  and write the table into that page
    python benchmarks/parity.py --read a.json b.json --markdown docs/weight-versions.md  of rows measured before

The rows are optimisers. A GPT of two layers (penstock.models.write_gpt) reads 48 characters of benchmarks/prose.txt, a
snapshot of these pages, and predicts the next one of each. Every seed has other weights and another order of the
samples; both schedules see the same. The comparison is that of `penstock verify --parity` (src/penstock/verification/parity.py). The
delay does not depend on the number of stages, so two are enough.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.models import write_gpt
from penstock.support.terminal import table
from penstock.verification.parity import DELAYED, HEADER, PLAIN, Parity, ParitySetting, compare, optimizers_of, report

PROSE = Path(__file__).with_name("prose.txt")
POSITIONS, WIDTH, LAYERS, HEADS, BATCH = 48, 48, 2, 4, 4
# Two learning rates for each.
OPTIMIZERS = "momentum:0.02,momentum:0.1,adamw:0.001,adamw:0.003,muon:0.005,muon:0.02"
BEGIN, END = "<!-- written by benchmarks/parity.py -->\n", "<!-- until here -->\n"


def write_samples(path: Path) -> int:
    """Write windows of the text as `tokens`, and shifted by one as `labels`.

    Return the number of different characters.
    """
    text = PROSE.read_text(encoding="ascii")
    letters = sorted(set(text))
    codes = np.array([letters.index(c) for c in text], dtype=np.int64)
    starts = np.arange(0, len(codes) - POSITIONS - 1, POSITIONS // 2)
    windows = codes[starts[:, None] + np.arange(POSITIONS + 1)]
    np.savez(path, tokens=windows[:, :-1], labels=windows[:, 1:])
    return len(letters)


def _measured(arguments: argparse.Namespace) -> list[Parity]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.npz"
        vocab = write_samples(data)

        def model(seed: int) -> ps.Model:
            path = Path(folder) / f"gpt{seed}.onnx"
            write_gpt(
                path, layers=LAYERS, width=WIDTH, heads=HEADS, vocab=vocab, positions=POSITIONS, batch=BATCH, seed=seed
            )
            return ps.from_onnx(path)

        setting = ParitySetting("cross_entropy", str(data), arguments.steps, arguments.microbatches, arguments.devices)
        return compare(model, optimizers_of(arguments.optimizers), setting, range(arguments.seeds))


def _read(files: Sequence[str]) -> list[Parity]:
    """Read rows in the order of their names, so that those of one kind are adjacent."""
    rows = [row for file in files for row in json.loads(Path(file).read_text(encoding="utf-8"))]
    return sorted(
        (Parity(row["optimizer"], tuple(row[PLAIN]), tuple(row[DELAYED])) for row in rows), key=lambda row: row.name
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--optimizers", default=OPTIMIZERS, metavar="LIST", help=f"KIND:RATE, ... (default: {OPTIMIZERS})"
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="optimiser steps (default: 400)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--microbatches", type=int, default=4, metavar="M", help="per batch (default: 4)")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="stages (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, with the loss of every step")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="train nothing: take the rows of these files")
    parser.add_argument("--markdown", metavar="FILE", help="write the table into this page, between its marks")
    arguments = parser.parse_args()
    rows = _read(arguments.read) if arguments.read else _measured(arguments)
    print(table(list(HEADER), report(rows)))
    if arguments.json:
        losses = [
            {f"{schedule} seed {seed}": losses_of_run for (schedule, seed), losses_of_run in row.losses.items()}
            for row in rows
        ]
        whole = [{**row.as_dict(), "losses": each} for row, each in zip(rows, losses, strict=True)]
        Path(arguments.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown:
        lines = [list(HEADER), ["---"] * len(HEADER), *report(rows)]
        page = Path(arguments.markdown)
        before, mark, after = page.read_text(encoding="utf-8").partition(BEGIN)
        if not mark:
            print(f"{page} has no line {BEGIN.strip()}", file=sys.stderr)
            return 1
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        page.write_text(before + mark + text + END + after.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
