"""The names of schedules: the one list of them.

What a schedule does is in its row of `passes/schedules`, which is asserted to have these names. The list stands here,
and imports nothing, so that a command line is parsed before the table is loaded.
"""

from __future__ import annotations

TRAINING = ("1f1b", "gpipe", "2bw", "eager-2bw", "zb-1f1b")
# Schedules whose updates are one batch late; the others compute what plain training does. The table is asserted to
# agree.
DELAYED = ("2bw", "eager-2bw", "interleaved-2bw", "wrap-2bw")
INFERENCE = "forward"
# Schedules of ranks that run several stages each.
PACKED = ("interleaved", "zb-v", "interleaved-2bw", "wrap", "wrap-2bw")
# Those that move weights the least, and are otherwise no faster than the same with more turns, and hold more.
WRAPPED = ("wrap", "wrap-2bw")
# Those that compute what plain training does, with one stage on a rank, and all of them.
SYNCHRONOUS = tuple(name for name in TRAINING if name not in DELAYED)
ALL_SYNCHRONOUS = tuple(name for name in (*TRAINING, *PACKED) if name not in DELAYED)
NAMES = (*TRAINING, INFERENCE)
