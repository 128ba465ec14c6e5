"""How tensors lie on a mesh: rules of operations, and the parts of a tensor that devices hold."""
