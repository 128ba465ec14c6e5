"""The kernels of a compiled module: their predicted and measured times."""
