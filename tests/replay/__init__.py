"""Hashes of the results of every pass on a fixed corpus of models. A change that is meant to change nothing changes
none of them."""
