"""Passes that decide what is held, what is computed again, and when values are dropped."""
