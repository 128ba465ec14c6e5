"""Stages on CUDA devices: kernels, library calls, and how both are built and loaded."""
