"""Prices: seconds of operations, kernels and messages on a device."""
