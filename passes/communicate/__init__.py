"""Passes that decide which values travel between stages, and in which precision."""
