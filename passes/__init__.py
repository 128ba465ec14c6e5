"""Compiler passes: pure functions from module to module, the table of passes, and the pipelines that order them."""
