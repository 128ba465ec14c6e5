"""Measurements, and what they teach the estimates."""
