"""Two hundred inputs that are wrong, the same in every run: bundles, data, checkpoints, cluster, training, plan and other files, environments, and names that would steer a terminal.

In: a folder with good files (`Good`). Out: for each case a command line, the environment it runs in, and the files it was given, made from the good
ones. Every case is wrong for certain: what is flipped, cut or replaced is what must be noticed.
"""

from __future__ import annotations

from acceptance.malformed_bundles import damaged_bundles, forged_bundles
from acceptance.malformed_case import Case
from acceptance.malformed_data import checkpoints, data
from acceptance.malformed_names import names
from acceptance.malformed_settings import clusters, environments, others, trainings

COUNT = 200


def cases() -> list[Case]:
    found = [
        *damaged_bundles(),
        *forged_bundles(),
        *data(),
        *checkpoints(),
        *clusters(),
        *trainings(),
        *others(),
        *environments(),
        *names(),
    ]
    assert len({case.name for case in found}) == len(found)
    return found
