"""Commands that look into programs, run passes over them and judge results."""
