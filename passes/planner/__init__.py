"""Plans chains of layers on unequal devices: depth, replicas and their shares, microbatches, recomputation and
schedule together. See docs/planner.md."""
