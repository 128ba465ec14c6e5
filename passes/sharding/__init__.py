"""Tensors over the devices of a mesh: layouts of a whole program, and the program of one device."""
