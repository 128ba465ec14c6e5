"""Passes that say what travels between stages, and in which precision."""
