"""The bundle: a compiled program as a directory that can be moved, checked and run."""
