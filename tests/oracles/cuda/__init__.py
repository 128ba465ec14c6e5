"""CUDA source on a processor."""
