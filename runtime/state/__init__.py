"""The tensors a rank holds."""
