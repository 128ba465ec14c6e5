"""Schedules of ranks that run several stages each, a file for each."""
