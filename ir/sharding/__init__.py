"""Layouts of tensors on a mesh: rules of operations, and the parts of a tensor that devices hold."""
