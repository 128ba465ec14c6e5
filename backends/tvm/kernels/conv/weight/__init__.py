"""Kernels of the gradient of a convolution for its weight."""
