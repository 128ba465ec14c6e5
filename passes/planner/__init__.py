"""Planner: choose depth, replicas and their shares, microbatches, recomputation and schedule together, for a chain of
layers on unequal devices. See docs/planner.md."""
