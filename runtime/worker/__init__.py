"""One rank of a run: its loop over the actions of its program."""
