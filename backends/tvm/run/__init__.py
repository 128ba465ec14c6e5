"""Compiled stages, loaded and called."""
