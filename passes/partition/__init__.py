"""Passes that cut a graph into stages."""
