"""Dimensions that stand for all sizes up to a bound: proof that padding changes nothing, and masks where it would."""
