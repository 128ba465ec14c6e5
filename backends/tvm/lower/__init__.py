"""From graphs to kernels in the order they run, and from kernels to TVM's functions."""
