"""Variables over the replicas of a stage: parts of optimiser state, gradients and weights on each of them."""
