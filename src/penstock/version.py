"""The version of the package, and nothing else: builds read it without importing the package."""

__version__ = "0.1.0"
