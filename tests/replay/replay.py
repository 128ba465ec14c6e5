"""Hashes of the result of every pass on every model of the corpus. They prove that a change which is meant to change
nothing did not.

    python tests/replay/replay.py                           say which models a pass treats otherwise than hashes.txt says
    python tests/replay/replay.py --diff NAME               what the first pass that changed makes of a model now, against the last commit
    python tests/replay/replay.py --diff NAME --against REV     against another one
    python tests/replay/replay.py --accept                  write hashes.txt anew, after a change that is meant

In hashes.txt a model's lines are what goes into the first pass and what each pass made, as the first 64 bits of the SHA-256 of the module's text; `-` where a pass changed
nothing. A hash depends on the model's structure, the passes and the text form, and on nothing of the machine: devices are those of cluster.toml.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from penstock.inspection.diff import differences
from penstock.ir.graph import Module
from penstock.ir.text import parse_module, print_module
from penstock.support.errors import PenstockError
from replay.corpus import CASES, modules_of

HASHES = Path(__file__).with_name("hashes.txt")
ROOT = Path(__file__).resolve().parents[2]
SAME = "-"
# A step is the name of a pass, numbered, or the input; with its hash.
Steps = list[tuple[str, str]]

# ---------------------------------------------------------------------------------------- hashes


def hashed(modules: Iterable[tuple[str, Module]]) -> Steps:
    """`modules` are those of one case, as `modules_of` gives them."""
    found: Steps = []
    last: Module | None = None
    for number, (call, module) in enumerate(modules):
        name = f"{number:02d} {call.partition('{')[0]}"
        found.append((name, SAME if module is last else hashlib.sha256(print_module(module).encode()).hexdigest()[:16]))
        last = module
    return found


def hashes_of(name: str) -> Steps:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, on its own affairs
        return hashed(modules_of(CASES[name]))


def write_hashes(found: Mapping[str, Steps], path: Path = HASHES) -> None:
    lines = ["# What every pass makes of the models of corpus.py; replay.py says how to read this, and writes it.\n"]
    for name, steps in found.items():
        lines += [f"{name}\n", *(f"  {step:18} {code}\n" for step, code in steps)]
    path.write_text("".join(lines), encoding="utf-8")


def read_hashes(path: Path = HASHES) -> dict[str, Steps]:
    found: dict[str, Steps] = {}
    steps: Steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            step, _, code = line.strip().rpartition(" ")
            steps.append((step.strip(), code))
        elif not line.startswith("#"):
            steps = found[line] = []
    return found


def changed(known: Steps, found: Steps) -> str:
    """The first step that differs, in words; empty when nothing does."""
    passes, now = [step for step, _ in known], [step for step, _ in found]
    if passes != now:
        lines = difflib.ndiff(passes, now)
        return "the pipeline has other passes: " + ", ".join(line for line in lines if line[0] in "+-")
    for (step, before), (_, after) in zip(known, found, strict=True):
        if before != after:
            return f"first change: {step}"
    return ""


# ---------------------------------------------------------------------------------------- differences


def keep(name: str, folder: Path) -> None:
    """Write the text of every step of a case; of those that changed nothing, too, so that files of two versions stand side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (call, module) in enumerate(modules_of(CASES[name])):
        (folder / f"{number:02d}_{call.partition('{')[0]}.ir").write_text(print_module(module), encoding="utf-8")


def keep_of_revision(name: str, revision: str, folder: Path) -> None:
    """The same by the code of a commit, its corpus and its passes, in a process of its own."""
    code = folder / "code"
    archive = folder / "code.tar"
    subprocess.run(["git", "-C", ROOT, "archive", "--format=tar", "-o", archive, revision], check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(code, filter="data")
    command = [
        sys.executable,
        "-W",
        "ignore",
        code / "tests" / "replay" / "replay.py",
        "--keep",
        folder / "before",
        name,
    ]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(code / "src")})


def told(before: Path, after: Path) -> Iterator[str]:
    """Lines on the first step whose texts differ, from two folders of `keep`."""
    first = {path.name: path for path in sorted(before.iterdir())}
    second = {path.name: path for path in sorted(after.iterdir())}
    if list(first) != list(second):
        yield f"passes before: {' '.join(first)}"
        yield f"passes now:    {' '.join(second)}"
    for name in first:
        if name not in second or first[name].read_bytes() == second[name].read_bytes():
            continue
        yield name
        old, new = (path.read_text(encoding="utf-8") for path in (first[name], second[name]))
        try:
            lines = list(differences(parse_module(old, name), parse_module(new, name)))
        except PenstockError:  # an older text form, which this parser does not read
            lines = []
        yield from lines or difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "now", lineterm="", n=1)
        return
    yield "no step that both have differs"


# ---------------------------------------------------------------------------------------- command


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accept", action="store_true", help="write hashes.txt anew")
    parser.add_argument("--diff", metavar="NAME", choices=CASES, help="show what changed for a model of the corpus")
    parser.add_argument("--against", metavar="REV", default="HEAD", help="the commit to compare with (HEAD)")
    parser.add_argument("--keep", nargs=2, metavar=("FOLDER", "NAME"), help="write the text of every step")
    given = parser.parse_args(words)
    if given.keep:
        keep(given.keep[1], Path(given.keep[0]))
        return 0
    if given.diff:
        with tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch:
            keep_of_revision(given.diff, given.against, Path(scratch))
            keep(given.diff, Path(scratch, "now"))
            for line in told(Path(scratch, "before"), Path(scratch, "now")):
                print(line)
        return 0
    known = read_hashes() if HASHES.exists() else {}
    found = {name: hashes_of(name) for name in CASES}
    lines = {name: changed(known.get(name, []), steps) for name, steps in found.items()}
    for name, line in lines.items():
        if line:
            print(f"{name}: {line if name in known else 'new'}")
    gone = sorted(known.keys() - found.keys())
    for name in gone:
        print(f"{name}: gone")
    if given.accept:
        write_hashes(found)
    return 0 if given.accept or not (gone or any(lines.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
