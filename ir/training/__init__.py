"""Optimisers, learning rates and groups of parameters, as data."""
