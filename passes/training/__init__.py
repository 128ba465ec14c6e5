"""Passes that make training out of a forward graph: gradients, guard and update."""
