"""Calibration: measurements of this machine teach estimates.

corrections   factors that runs left behind, and prices that know them
grade         a run against the plan of its bundle
profile       times of a bundle's ranks, measured one by one
"""
