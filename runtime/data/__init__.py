"""Samples for the inputs of a module, from files or from a program."""
