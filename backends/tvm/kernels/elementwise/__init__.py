"""Kernels of elementwise, layout and lookup operations."""
