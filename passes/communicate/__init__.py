"""Passes that decide which values travel between stages, in which precision, and when collectives begin."""
