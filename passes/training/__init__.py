"""Passes that make a training step of a forward graph: gradients, guard and update."""
