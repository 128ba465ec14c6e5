"""Support: what every part of the package may use, and what knows nothing of models."""
