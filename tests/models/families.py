"""All families of models, by name."""

from __future__ import annotations

from . import first_families, more_families
from .family import FAMILIES, build

__all__ = ["FAMILIES", "build", "first_families", "more_families"]
