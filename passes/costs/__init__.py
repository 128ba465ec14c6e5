"""Cost model: the seconds of operations, kernels and messages on a device."""
