"""Widths of layers: each layer's samples over as many devices of a mesh as pay for it, `--shard widths`."""
