"""The ONNX frontend: `import_onnx` reads a model file by its path."""

from penstock.frontends.imported import Imported

from .binding import open_dimensions
from .importer import import_onnx
from .report import CannotImport

__all__ = ["CannotImport", "Imported", "import_onnx", "open_dimensions"]
