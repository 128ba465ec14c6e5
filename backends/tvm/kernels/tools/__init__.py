"""Parts that all kernel generators are made of: statements, vectors, elements, functions."""
