"""Eight sharded programs in IR and in jax, and the bytes that collectives of both move."""
