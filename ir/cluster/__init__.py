"""Devices, hosts and the links between them, and the file that describes them."""
