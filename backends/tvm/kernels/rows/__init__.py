"""Kernels of reductions and of operations along rows."""
