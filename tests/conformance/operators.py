"""A table from ONNX operators to the IR operations that their node tests are imported as.

    python tests/conformance/operators.py            write operators.json anew
    python tests/conformance/operators.py --check    exit 1 if it is out of date

docs/refresh.py makes the table of operators in docs/onnx-operators.md from it, from the lists of tests that fail, and from the tables of gradients and kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from conformance.binding import attempts
from conformance.cases import PLAIN, Case, collect, members
from conformance.execution import imported_case
from penstock.frontends.onnx import Imported
from penstock.ir.graph import Graph, Value
from penstock.ir.types import FLOATS
from penstock.passes.training.vjp import FLAT
from penstock.support.errors import UnsupportedModel, UsageError

FILE = Path(__file__).resolve().parent / "operators.json"
TO_INTEGERS = "cast to integers"


def imported(case: Case, path: Path) -> Imported | None:
    """As `judged` imports it."""
    for known in attempts(case.model):
        try:
            return imported_case(case, known, path)
        except (UnsupportedModel, UsageError):
            continue
    return None


def operators() -> dict[str, dict[str, list[str]]]:
    """By operator: its plain tests, all kinds of IR operations that they become, and those among them that a gradient passes, or
    ends at because they are flat, on its way to an operand that has one, or has none."""
    table: dict[str, dict[str, set[str]]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-operators-") as folder:
        for case in collect():
            if PLAIN not in members(case):
                continue
            # A test of several nodes is one of the operator that its name begins with, which the last of its nodes mostly is.
            row = table.setdefault(
                case.model.graph.node[-1].op_type, {"tests": set(), "kinds": set(), "floats": set(), "flat": set()}
            )
            row["tests"].add(case.name)
            found = imported(case, Path(folder) / "case.onnx")
            if found is not None:
                row["kinds"].update(op.kind for op in found.module.graphs["main"].ops)
                main = found.module.graphs["main"]
                for value in main.ins:
                    kinds = passed(main, value)
                    flat = kinds.intersection([*FLAT, TO_INTEGERS])
                    row["flat" if flat else "floats"].update(flat or kinds)
    return {name: {key: sorted(values) for key, values in row.items()} for name, row in sorted(table.items())}


def passed(main: Graph, source: Value) -> set[str]:
    """Kinds of the operations between an input and results that are floats, as `autodiff` follows them: comparisons end a path."""
    useful = {v for v in main.outs if v.type.dtype in FLOATS}
    for op in reversed(main.ops):
        if useful.intersection(op.outs):
            useful.update(op.ins)
    found, kinds = {source} if source.type.dtype in FLOATS else set(), set()
    for op in main.ops:
        if not (found.intersection(op.ins) and useful.intersection(op.outs)):
            continue
        if any(v.type.dtype in FLOATS for v in op.outs):
            found.update(op.outs)
            kinds.add(op.kind)
        elif op.kind in FLAT:
            kinds.add(op.kind)
        elif op.kind == "cast" and op.outs[0].type.dtype != "bool":
            kinds.add(TO_INTEGERS)
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = json.dumps(operators(), indent=1) + "\n"
    if given.check:
        stale = not FILE.is_file() or FILE.read_text(encoding="utf-8") != text
        if stale:
            print(f"{FILE.name} is out of date: run python tests/conformance/operators.py", file=sys.stderr)
        return int(stale)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
