"""The layouts of tensors over devices, and the collectives that they cost."""
