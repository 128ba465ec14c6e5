"""The static verifier: one checker for each fact about a module."""
