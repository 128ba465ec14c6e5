"""What every pass changes, for a small MLP that is trained on two stages with 2bw.

python look_at_passes.py [PASS]          all passes: a line each; with a name: the lines that pass changed
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from pathlib import Path

import penstock as ps
from penstock.dumping import Dump
from penstock.models import write_mlp


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        model = ps.from_onnx(write_mlp(Path(folder) / "mlp.onnx", [8, 16, 4]), dims={"batch": 2})
        training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=2)
        ps.plan(model, ps.Cluster.local(2), training, schedule="2bw", dump=Dump(folder))
        dumps = sorted(Path(folder).glob("[0-9][0-9]_*.ir"))
        texts = [path.read_text().splitlines() for path in dumps]
    for before, path, after in zip(texts, dumps[1:], texts[1:], strict=False):
        changes = [
            line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("---", "+++") and line[0] in "+-"
        ]
        if wanted is None:
            print(f"{path.stem}: {sum(line[0] == '+' for line in changes)} lines added, {sum(line[0] == '-' for line in changes)} removed")
        elif path.stem.partition("_")[2] == wanted:
            print("\n".join(changes))


if __name__ == "__main__":
    main()
