"""The kernels of a graph: which operations run as one, and who computes them."""
