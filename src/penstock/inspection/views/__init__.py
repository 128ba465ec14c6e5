"""Facts as text and pictures for people."""
