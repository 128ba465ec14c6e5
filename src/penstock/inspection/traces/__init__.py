"""Traces of runs, read back: times and memory."""
