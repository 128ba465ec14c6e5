"""Passes that decide which values are held, which are computed again, and when values are dropped."""
