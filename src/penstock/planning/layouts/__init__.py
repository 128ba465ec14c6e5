"""Layouts of tensors on a mesh, chosen by price: `--shard auto`."""
