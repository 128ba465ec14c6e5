"""The kernels of a graph: the operations that run as one, and the code that computes them."""
