"""Kernels of convolutions, their gradients for the input, and pooling."""
