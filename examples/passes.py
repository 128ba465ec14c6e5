"""See what every pass of the compiler changes, and resume from the middle.

Compiles a small MLP for two stages with 2bw, with a dump after each pass, and lists the passes. With the name of a pass
it prints the lines which that one changed.

Fails unless every dump leads to the same module: `penstock opt`, run on a dump with the remaining passes, must write
the last dump again, byte for byte.

Takes about a quarter of a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import csv
import difflib
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from penstock.models import write_mlp


def penstock(*words: str | Path) -> None:
    """Run a command of penstock."""
    subprocess.run([sys.executable, "-m", "penstock", *words], check=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep model, bundle and dumps in this folder (default: keep nothing)")
    parser.add_argument("--every", type=int, default=4, help="go on from every so many-th dump")
    parser.add_argument("name", nargs="?", metavar="PASS", help="print what this one changed")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        model, dumps = write_mlp(folder / "mlp.onnx", [8, 16, 4]), folder / "dumps"
        settings = [
            "--dim",
            "batch=2",
            "--devices",
            "2",
            "--loss",
            "mse",
            "--optimizer",
            "sgd",
            "--lr",
            "0.1",
            "--microbatches",
            "2",
            "--schedule",
            "2bw",
        ]
        penstock("compile", model, "-o", folder / "bundle", *settings, "--backend", "numpy", "--dump-ir", dumps)

        with (dumps / "passes.tsv").open() as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        files = {int(path.name[:2]): path for path in sorted(dumps.glob("[0-9][0-9]_*.ir"))}
        for row in rows:
            row["pass"] = row["pass"].partition("{")[0]  # without its options
        names = {row["pass"] for row in rows}
        if options.name is not None and options.name not in names:
            sys.exit(f"no pass {options.name!r} ran, there are {', '.join(sorted(names))}")
        before: list[str] = []
        for row in rows:
            after = files[int(row["number"])].read_text().splitlines() if int(row["number"]) in files else before
            changes = [
                line
                for line in difflib.unified_diff(before, after, n=0, lineterm="")
                if not line.startswith(("---", "+++", "@@"))
            ]
            if options.name is None:
                added, removed = (sum(line[0] == sign for line in changes) for sign in "+-")
                print(
                    f"{row['number']:>2} {row['pass']:16} {added:4} lines added, {removed:4} removed, "
                    f"{row['ops_after']:>3} operations"
                )
            elif row["pass"] == options.name:
                print("\n".join(changes))
            before = after

        wanted = files[max(files)].read_bytes()
        for row in rows[:: options.every]:
            file = files.get(int(row["number"]))
            if file is None or not row["rest"]:
                continue
            print(f"going on from {file.name}", file=sys.stderr)
            penstock("opt", file, "-p", row["rest"], "-o", folder / "again.ir")
            if (folder / "again.ir").read_bytes() != wanted:
                sys.exit(f"from {file.name} on, the passes that are left write another module")


if __name__ == "__main__":
    main()
