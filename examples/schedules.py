"""The schedules as pictures: who computes which microbatch when, a backward taking twice as long as a forward.

python schedules.py [STAGES [MICROBATCHES]]
"""

from __future__ import annotations

import sys

from penstock.ir.simulate import format_grid
from penstock.passes.schedules import SCHEDULES, build_schedule


def main() -> None:
    stages = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    microbatches = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    for kind, row in SCHEDULES.items():
        print(f"{kind}: {row.doc}")
        print(format_grid(build_schedule(kind, stages, microbatches), 2), end="\n\n")


if __name__ == "__main__":
    main()
