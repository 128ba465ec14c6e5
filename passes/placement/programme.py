"""Linear and integer programmes for the solver HiGHS: variables, rows, and one variable to minimise.

The same programme has the same answer: one thread, a fixed seed, and a limit on nodes of the search tree instead of one
on seconds. HiGHS meets rows and whole numbers to about a millionth, so the caller computes the value of a solution
again. `bound` is the bound that HiGHS has proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from .problem import Progress

_SEED = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the solver. `values` is empty where the search ended without a solution; `bound` is infinity where
    there is none."""

    values: tuple[float, ...]
    bound: float
    nodes: int


@dataclass(slots=True)
class Programme:
    """An integer programme. Variables are numbered from 0 on; the first is minimised."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    _starts: list[int] = field(default_factory=lambda: [0])
    _columns: list[int] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)
    _least: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._most)

    def variable(self, lower: float = 0.0, upper: float = inf, whole: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.lower) - 1

    def row(self, terms: Iterable[tuple[int, float]], least: float = -inf, most: float = inf) -> None:
        """Add the row least <= sum of weight * variable <= most; a variable may come several times."""
        weights: dict[int, float] = {}
        for variable, weight in terms:
            weights[variable] = weights.get(variable, 0.0) + weight
        self._columns += weights.keys()
        self._weights += weights.values()
        self._starts.append(len(self._columns))
        self._least.append(least)
        self._most.append(most)

    def minimise(self, start: Sequence[float] = (), nodes: int = 0, progress: Progress | None = None) -> Answer:
        """Minimise the first variable. `start` is a known solution, `nodes` limits the size of the search tree."""
        import highspy

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.lower), len(self._most)
        lp.col_cost_ = np.eye(1, len(self.lower))[0]
        lp.col_lower_, lp.col_upper_ = np.array(self.lower), np.array(self.upper)
        lp.row_lower_, lp.row_upper_ = np.array(self._least), np.array(self._most)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self._weights)
        if any(self.whole):
            kinds = highspy.HighsVarType
            lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self.whole]
        # Threads belong to the process, and another caller may have set more of them.
        highspy.Highs.resetGlobalScheduler(True)
        solver = highspy.Highs()
        settings = {
            "output_flag": False,
            "threads": 1,
            "parallel": "off",
            "random_seed": _SEED,
            "mip_rel_gap": 1e-9,
            "mip_abs_gap": 1e-12,
        }
        for name, value in settings.items():
            solver.setOptionValue(name, value)
        if nodes:
            solver.setOptionValue("mip_max_nodes", nodes)
        solver.passModel(lp)
        if len(start):
            known = highspy.HighsSolution()
            known.col_value = list(start)
            solver.setSolution(known)
        if progress is not None and any(self.whole):
            solver.cbMipInterrupt.subscribe(
                lambda event: progress(_counted(event, nodes), max(nodes, 1), "nodes of the search tree")
            )
        solver.run()
        return self._answer(solver, highspy)

    def _answer(self, solver: Any, highspy: Any) -> Answer:
        status = solver.getModelStatus()
        states = highspy.HighsModelStatus
        info = solver.getInfo()
        if status == states.kInfeasible:
            return Answer((), inf, max(0, info.mip_node_count))
        if any(self.whole):
            bound = float(info.mip_dual_bound)
            solved = info.primal_solution_status == 2
            count = max(0, int(info.mip_node_count))
        else:
            solved = status == states.kOptimal
            bound = float(info.objective_function_value) if solved else -inf
            count = 0
        values = tuple(float(x) for x in solver.getSolution().col_value) if solved else ()
        return Answer(values, bound, count)


def _counted(event: Any, nodes: int) -> int:
    """Return the nodes so far, but never all of them: only the caller knows when it is done."""
    return min(int(event.data_out.mip_node_count), max(nodes, 1) - 1)
