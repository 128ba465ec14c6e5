"""Judges of the product: comparisons with references that do not share its fast path."""
