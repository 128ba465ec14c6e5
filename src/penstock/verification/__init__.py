"""Comparisons of what Penstock computes with references that do not share its fast path."""
