"""Damaged model files, which import must answer with a module or with an error of its own (README.md)."""
