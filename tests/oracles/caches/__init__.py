"""Caches of sequences that grow: their turns, and the meaning of their rows in torch."""
