"""Kernels of caches: rows that are stored, attention over blocks, and the choice of a word."""
