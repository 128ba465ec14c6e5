"""Import damaged model files, each in a process of its own.

    python tests/fuzz/run.py --count 5000           the first 5000, with a summary
    python tests/fuzz/run.py --first 4711 --count 1 --keep FOLDER     one of them, its files kept

File number i is the same in every run. An import has to end, in time and in memory, with a module whose types are right or with one of
Penstock's own errors. A limit that is met only because memory is limited, which a message says, counts as a failure, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"

from oracles.limits import ANSWERED, Outcome, each

from fuzz.damage import damaged
from fuzz.seeds import MODEL, Seeds, read_seeds, seeds
from penstock.frontends.onnx import import_onnx
from penstock.ir.verify.verifier import check
from penstock.support.errors import PenstockError, UnsupportedModel, UsageError

SECONDS = 10.0
GROWTH = 2 << 30
IMPORTED, REFUSED, INVALID = "imported", "unsupported", "invalid"


def write_files(index: int, folder: Path, names: Seeds | None = None) -> Path:
    """File number `index`, made from one of `names`, and what lies beside it; links and a pipe for locations to name."""
    names = seeds() if names is None else names
    draw = random.Random(f"penstock {index}")
    _, files = names[index % len(names)] if draw.random() < 0.5 else draw.choice(names[:14])
    for relative, content in files.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if len(files) > 1:
        (folder / "link.bin").symlink_to("/etc/hostname")
        (folder / "up").symlink_to("..")
        os.mkfifo(folder / "pipe")
    (folder / MODEL).write_bytes(damaged(files[MODEL], draw))
    return folder / MODEL


def imported(path: Path) -> str:
    """How the import of a file ends: IMPORTED, or an error of ours with its message."""
    try:
        found = import_onnx(path)
    except UnsupportedModel as error:
        return f"{REFUSED} {error}"
    except UsageError as error:
        return f"{INVALID} {error}"
    except PenstockError as error:
        raise AssertionError(f"import ends with {type(error).__name__}: {error}") from error
    check(found.module, ("typed",))
    assert set(found.weights) == set(found.module.vars)
    for name, var in found.module.vars.items():
        assert found.weights[name].shape == var.type.shape
    return IMPORTED


def wrong(outcome: Outcome) -> str:
    """What is wrong about how an import ended; empty when nothing is."""
    if outcome.ended != ANSWERED:
        return f"{outcome.ended} {outcome.text}"
    if "allocate" in outcome.text or "MemoryError" in outcome.text:
        return f"runs into the limit of memory: {outcome.text}"
    return ""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--keep", metavar="FOLDER", help="where to leave the files of those that fail, or of the only one"
    )
    parser.add_argument("--json", metavar="FILE", help="write counts and failures")
    parser.add_argument(
        "--seeds", metavar="FILE", help="what `write_seeds` wrote, in place of making the models that are damaged"
    )
    given = parser.parse_args(words)
    names = read_seeds(Path(given.seeds)) if given.seeds else seeds()
    began = time.monotonic()
    ends: Counter[str] = Counter()
    failures: dict[int, str] = {}
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as scratch:
        indices = range(given.first, given.first + given.count)

        def work(index: int) -> str:
            folder = Path(scratch) / str(index)
            folder.mkdir()
            return imported(write_files(index, folder, names))

        for at, outcome in each(work, indices, seconds=SECONDS, growth=GROWTH, jobs=given.jobs):
            slowest = max(slowest, outcome.seconds)
            problem = wrong(outcome)
            ends["failed" if problem else outcome.text.split()[0]] += 1
            if problem:
                failures[indices[at]] = problem
            if given.count == 1:
                print(outcome.ended, outcome.text)
            if given.keep and (problem or given.count == 1):
                folder = Path(given.keep) / str(indices[at])
                folder.mkdir(parents=True, exist_ok=True)
                write_files(indices[at], folder, names)
    for index, problem in sorted(failures.items()):
        print(f"{index}: {problem[:300]}")
    counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(f"{given.count} files: {counts}; the slowest took {slowest:.1f} s, all {time.monotonic() - began:.0f} s")
    if given.json:
        Path(given.json).write_text(json.dumps({"ends": ends, "failures": failures}), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
