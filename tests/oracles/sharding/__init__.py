"""Modules in local form, and whole ones with the same meaning, for tests of several folders."""
