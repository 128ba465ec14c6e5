"""Alpa's optima of the problems.

`python tests/oracles/beside_alpa/in_alpa.py` writes alpa.json, `--print` prints it.

Alpa 0.2.3 needs releases of jax and ray that run on no Python of today, but its searches are plain functions. They are
copied out of the installed files into a module of their own, with what they use of Alpa left empty. It takes
`pip install --no-deps alpa==0.2.3 pulp`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

if __name__ == "__main__":
    # Relative imports of a program start where its package is said to be.
    sys.path[0], __package__ = str(Path(__file__).resolve().parents[2]), "oracles.beside_alpa"

from .exported import exported
from .problems import DATA, TABLES, DrawnTable, as_data, from_data, serialized

_FUNCTIONS = {
    "pipeline_parallel/stage_construction.py": ("training_dp_impl", "training_dp"),
    "shard_parallel/auto_sharding.py": ("_call_solver_serialized_args",),
}
_HEAD = """
import multiprocessing
import time

import numpy as np


def maybe_numba_jit(function):
    return function


class _Timer:
    def start(self):
        pass

    stop = start


def timers(name):
    return _Timer()


last_s_val = last_objective = None
INFINITY_COST = 1e13
"""


def alpa_functions(folder: Path) -> ModuleType:
    """Return a module with Alpa's searches, written into a folder."""
    spec = importlib.util.find_spec("alpa")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root, parts = Path(spec.submodule_search_locations[0]), [_HEAD]
    for name, functions in _FUNCTIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                parts.append(ast.get_source_segment(text, node) or "")
    path = folder / "alpa_functions.py"
    path.write_text("\n\n".join(parts), encoding="utf-8")
    made = importlib.util.spec_from_file_location("alpa_functions", path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def stages_of(alpa: ModuleType, table: DrawnTable) -> float | None:
    """Return the seconds of Alpa's best stages on some of the devices; None where nothing fits."""
    costs, behind = table.costs()[:, :, None, None], table.most_behind()[:, :, None, None]
    finite = np.where(np.isfinite(costs), costs, 1e9)
    best = np.inf
    for devices in range(1, table.devices + 1):
        seconds, _ = alpa.training_dp(len(table.seconds), devices, table.microbatches, [(1, 1)], 1, finite, behind)
        best = min(best, float(seconds))
    return best if best < 1e8 else None


def optima(tables: int = TABLES) -> dict[str, Any]:
    """Return what Alpa finds for all problems."""
    with tempfile.TemporaryDirectory() as folder:
        alpa = alpa_functions(Path(folder))
        problems = {name: as_data(costs) for name, costs in exported().items()}
        layouts = {
            name: {**data, "objective": alpa._call_solver_serialized_args(**serialized(from_data(data)))[2]}
            for name, data in problems.items()
        }
        stages = [stages_of(alpa, DrawnTable.of(seed)) for seed in range(tables)]
    return {"alpa": version("alpa"), "pulp": version("pulp"), "stages": stages, "layouts": layouts}


if __name__ == "__main__":
    text = json.dumps(optima(), sort_keys=True) + "\n"
    if sys.argv[1:] == ["--print"]:
        print(text)
    else:
        DATA.write_text(text, encoding="utf-8")
