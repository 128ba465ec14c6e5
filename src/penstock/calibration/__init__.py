"""Calibration: measurements of this machine teach estimates.

corrections   factors that runs left behind, and prices that know them
grade         a run against the plan of its bundle
measured      the table of measured times
profile       times of a bundle's ranks, measured one by one
rehearse      one rank of a bundle, run by itself
"""
