"""Layouts of tensors on the axes of a mesh: the slices of a whole tensor that a device has."""
