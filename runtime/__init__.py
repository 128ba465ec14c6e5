"""What runs bundles: processes that hold stages, messages between them, their data, checkpoints, and what is said of all that."""
