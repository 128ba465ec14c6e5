"""Sizes that change: bounds of dimensions, and the ladder of programs that stand for all sizes up to a bound."""
