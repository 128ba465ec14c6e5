"""Products on tile registers (Intel AMX)."""
