"""Readers of weights that are stored in 8 or 4 bits: their whole numbers as they are, without rounding again."""
