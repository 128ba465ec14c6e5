"""Measurements of a run: metrics, traces, memory and utilisation."""
