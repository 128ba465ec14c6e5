"""Defaults and choices of settings that launcher and ranks share. Loads nothing, so that help texts can name them."""

from __future__ import annotations

# The most seconds without a sign of life of a rank, and the most seconds that a rank waits for a live one.
HEARTBEAT, TIMEOUT = 10.0, 600.0
# A source of made-up samples, in place of files.
SYNTHETIC = "synthetic"
# Choices where samples are no multiple of a batch: go on with the next epoch, drop the remaining ones, or fill up from
# the same epoch.
WRAP, DROP, PAD = "wrap", "drop", "pad"
LAST = (WRAP, DROP, PAD)
# Microbatches that are read ahead.
AHEAD = 4
# Choices for a loss or gradient that is not finite: end the run, demand a bundle that skips such updates, or warn.
STOP, SKIP, WARN = "stop", "skip", "warn"
NAN_POLICIES = (STOP, SKIP, WARN)
# Choices of how requests to an inference bundle share microbatches (job/dispatcher.py), and the most that may wait.
THROUGHPUT, LATENCY = "throughput", "latency"
MODES = (THROUGHPUT, LATENCY)
QUEUE = 64
