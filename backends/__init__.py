"""Back ends: what turns the graphs of a stage into programs, behind one interface (interface.py)."""
