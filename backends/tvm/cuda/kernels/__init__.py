"""Kernel generators for GPUs, and calls of the vendor's libraries."""
