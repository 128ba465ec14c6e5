"""The modules that are named by strings: those that processes begin in, and what a lower room asks a higher one for.

An import is an arrow that tests of the layout see; a string is none. So every module that is named by a string stands
in this table, and nowhere else.

In: a name. Out: the module path, for a command line (`command_line`) or for an import in a process that runs (`load`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

ENTRY_POINTS = {
    # Begins and ends processes whose work is the `main` of one of the modules below (processes.py).
    "begin": "penstock.support.processes",
    "join": "penstock.runtime.launch.joined",
    "rehearse": "penstock.calibration.rehearse",
    "links": "penstock.doctor.links",
    "yardsticks": "penstock.doctor.kernels",
    "local rates": "penstock.doctor.local_rates",
    "gpu rates": "penstock.doctor.gpu_rates",
    # Forks ranks, and what it imports for them.
    "forkserver": "penstock.runtime.launch.forkserver",
    "rank": "penstock.runtime.worker.worker",
    # Makes code for CPUs, and for GPUs.
    "compile": "penstock.backends.tvm.compile.worker",
    "compile for cuda": "penstock.backends.tvm.cuda.compiler",
    # Plans anew for fewer devices.
    "replan": "penstock.planning.replan",
    # Shows modules, bundles, plans and traces in a notebook: it knows them all, and they know nothing of it.
    "notebook": "penstock.inspection.notebook",
}


def command_line(name: str) -> list[str]:
    """Return the command of a process that begins in a module; the arguments are to follow."""
    return [sys.executable, "-P", "-m", ENTRY_POINTS[name]]


def load(name: str) -> ModuleType:
    """Import a module in this process."""
    return importlib.import_module(ENTRY_POINTS[name])
