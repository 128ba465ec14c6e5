"""Bytes between ranks: over gloo, and through shared memory on one host."""
