"""Rewriting passes: they make a graph better without changing its meaning."""
