"""The readers of traces of runs: times and memory."""
