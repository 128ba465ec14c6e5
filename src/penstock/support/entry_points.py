"""Modules that are named by strings: what processes are started with, and what a lower room asks a higher one for.

An import is an arrow that tests of the layout see; a string is none. So every module that is named by a string stands in this
table, and nowhere else.
"""

from __future__ import annotations

ENTRY_POINTS = {
    # Shows modules, bundles, plans and traces in a notebook: it knows them all, and they know nothing of it.
    "notebook": "penstock.inspection.notebook",
}

__all__ = ["ENTRY_POINTS"]
