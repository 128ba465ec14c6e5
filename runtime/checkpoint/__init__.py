"""Checkpoints: their format, how they are written, found, locked and resumed from."""
