"""Predicted memory of every rank: blocks, their sizes and when they live."""
