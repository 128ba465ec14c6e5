"""Back ends: compilers and runners of the graphs of stages, with one interface (interface.py)."""
