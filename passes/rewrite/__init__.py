"""Passes that make a graph better without changing its meaning."""
