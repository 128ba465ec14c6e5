"""Readers of models: each turns a file or a program into a Module of the IR and the elements of its variables."""
