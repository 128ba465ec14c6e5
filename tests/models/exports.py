"""Verdicts of `penstock verify` on exports of other libraries' models.

    python tests/models/exports.py --exporter PYTHON [--seeds N ...] [--only FAMILY ...] [--json FILE]

PYTHON has torch, onnxscript, timm, torchvision and transformers, and need not have Penstock; write_exports.py runs in
it. For each family of export_list.py and each seed a file is exported, and verified twice: on inputs that are drawn and
on inputs of the family's own kind. All of these models are right: each FAILED is a false one. The exit code is 1 if
there is one.

    python tests/models/exports.py --exporter PYTHON --faults 50 [--json FILE]

draws the controls: so many faults of one number that have an effect, each in the code of another family, of which none
may be missed (tests/verification/faults.py says what an effect is).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

if __name__ == "__main__":
    # Relative imports of a program start where its package is said to be.
    sys.path[0], __package__ = str(Path(__file__).resolve().parents[1]), "models"

from verification.faults import FOUND, draw

from penstock.commands.parser import main as penstock

from .export_list import EXPORTS

FOLDER = Path(__file__).resolve().parent
OK, UNTOLD, FAILED, REFUSED = "ok", "cannot tell", "FAILED", "not imported"
KINDS = ("drawn", "own")


def exported(exporter: str, seed: int, families: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Export families one after the other, and yield each name with the reason why there is no file, if so."""
    command = [exporter, str(FOLDER / "write_exports.py"), str(folder), str(seed), *families]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"family": '):
                answer = json.loads(line)
                yield answer["family"], answer["problem"]
    if process.returncode:
        raise SystemExit(f"the exporter ended with code {process.returncode}")


def verdict(path: Path, more: Sequence[str]) -> tuple[str, str]:
    """Return the verdict of `penstock verify`, and what it said."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = penstock(["verify", str(path), *more])
    said = out.getvalue() + err.getvalue()
    words = {0: UNTOLD if UNTOLD in out.getvalue() else OK, 5: FAILED}
    return words.get(code, REFUSED), said


class Record:
    """The verdicts by family, seed and kind of inputs. They are written to a file after each, and read from it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.families: dict[str, dict[str, str]] = {}
        self.faults: list[str] = []
        if path is not None and path.exists():
            document = json.loads(path.read_text())
            self.families, self.faults = document["families"], document["faults"]

    def counts(self) -> Counter[str]:
        """Count the verdicts."""
        return Counter(answer for answers in self.families.values() for answer in answers.values())

    def has(self, family: str, seed: int) -> bool:
        """Return whether a file was verified on all kinds of inputs."""
        return all(f"{seed} {kind}" in self.families.get(family, {}) for kind in KINDS)

    def add(self, family: str, seed: int, kind: str, answer: str) -> None:
        """Add a verdict."""
        self.families.setdefault(family, {})[f"{seed} {kind}"] = answer
        self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        if self._path is not None:
            families = {name: self.families[name] for name in EXPORTS if name in self.families}
            document = {"counts": dict(self.counts()), "faults": self.faults, "families": families}
            self._path.write_text(json.dumps(document, indent=1) + "\n")


def judge(exporter: str, seeds: Sequence[int], families: Sequence[str], record: Record) -> None:
    """Verify all families with all seeds, but for what the record has."""
    for seed in seeds:
        missing = [family for family in families if not record.has(family, seed)]
        if not missing:
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-exports-") as scratch:
            for family, problem in exported(exporter, seed, missing, Path(scratch)):
                if problem:
                    raise SystemExit(f"{family} cannot be exported with seed {seed}: {problem}")
                path = Path(scratch) / f"{family}-{seed}.onnx"
                for kind, more in zip(
                    KINDS, (["--seed", str(seed)], ["--data", f"{path.with_suffix('.npz')}"]), strict=True
                ):
                    begin = time.monotonic()
                    answer, said = verdict(path, more)
                    record.add(family, seed, kind, answer)
                    print(f"{family:16} seed {seed} {kind:6} {time.monotonic() - begin:5.1f} s  {answer}", flush=True)
                    if answer != OK:
                        print(said, flush=True)
                path.unlink()


def try_faults(exporter: str, count: int, families: Sequence[str], record: Record) -> Counter[str]:
    """Put faults into the code of families, one after the other, and return what became of them."""
    record.faults, counts = [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="penstock-exports-") as scratch:
        folder = Path(scratch)
        chosen = list(families)[:: max(1, len(families) // count)][:count]
        for family, problem in exported(exporter, 0, chosen, folder):
            if problem:
                raise SystemExit(f"{family} cannot be exported: {problem}")

        def written(family: str, seed: int, folder: Path) -> tuple[Path, Path]:
            return folder / f"{family}-0.onnx", folder / f"{family}-0.npz"

        for fault in draw(count, 0, folder, "tvm", chosen, written, ("code",)):
            print(fault, flush=True)
            record.faults.append(str(fault))
            counts[fault.verdict] += 1
            record.write()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exporter", required=True, metavar="PYTHON")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--only", nargs="+", choices=list(EXPORTS), default=list(EXPORTS), metavar="FAMILY")
    parser.add_argument("--json", type=Path, metavar="FILE", help="verdicts; what it has already is not done again")
    parser.add_argument("--faults", type=int, metavar="N", help="instead of verdicts on what is right")
    arguments = parser.parse_args()
    record = Record(arguments.json)
    if arguments.faults:
        verdicts = try_faults(arguments.exporter, arguments.faults, arguments.only, record)
        print(", ".join(f"{number} {answer}" for answer, number in verdicts.items()))
        return int(verdicts[FOUND] < arguments.faults)
    judge(arguments.exporter, arguments.seeds, arguments.only, record)
    counts = record.counts()
    listed = ", ".join(f"{number} {answer}" for answer, number in counts.items())
    print(f"{len(record.families)} families, {counts.total()} verdicts: {listed}")
    return int(bool(counts[FAILED] + counts[REFUSED]))


if __name__ == "__main__":
    sys.exit(main())
