"""Measurements of this machine: devices, links, and a cluster file of them."""
