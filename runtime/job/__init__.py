"""A run as a program holds it: training, inference, and `penstock run`."""
