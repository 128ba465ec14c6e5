"""Defaults and choices of settings that launcher and ranks share. Loads nothing, so that help texts can name them."""

from __future__ import annotations

# Seconds that a rank may give no sign of life, and that one which lives may keep another one waiting.
HEARTBEAT, TIMEOUT = 10.0, 600.0
# A source of made-up samples, in place of files.
SYNTHETIC = "synthetic"
# Where samples are no multiple of a batch: go on with the next epoch, drop the rest, or fill up from the same epoch.
WRAP, DROP, PAD = "wrap", "drop", "pad"
LAST = (WRAP, DROP, PAD)
# Microbatches that are read ahead.
AHEAD = 4
# What a loss or gradient that is not finite does: end the run, demand a bundle that leaves such updates out, or warn.
STOP, SKIP, WARN = "stop", "skip", "warn"
NAN_POLICIES = (STOP, SKIP, WARN)
# How requests to an inference bundle share microbatches (job/dispatcher.py), and how many may wait.
THROUGHPUT, LATENCY = "throughput", "latency"
MODES = (THROUGHPUT, LATENCY)
QUEUE = 64
