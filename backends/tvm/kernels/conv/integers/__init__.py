"""Kernels of convolutions of whole numbers of 8 bits."""
