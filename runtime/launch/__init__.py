"""Starting the ranks of a run, watching them, and starting them again."""
