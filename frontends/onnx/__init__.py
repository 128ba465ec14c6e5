"""The ONNX frontend: `import_onnx` reads a model file by its path."""

from penstock.frontends.imported import Imported

from .binding import open_dimensions
from .importer import import_onnx
from .report import CannotImport
from .source import OnnxFile

__all__ = ["CannotImport", "Imported", "OnnxFile", "import_onnx", "open_dimensions"]
