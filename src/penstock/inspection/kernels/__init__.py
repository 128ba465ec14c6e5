"""The kernels of a compiled module: what they should cost, and what they do cost."""
