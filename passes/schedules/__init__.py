"""Schedules: who computes which microbatch when, a file for each, and the passes that follow from them."""
