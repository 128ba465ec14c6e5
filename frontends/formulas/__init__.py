"""Decompositions that the rules of several frontends share, written through `Writer`."""
