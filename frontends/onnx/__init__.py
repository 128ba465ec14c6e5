"""ONNX models as modules: `import_onnx` reads a file by its path."""

from ..imported import Imported
from .importer import import_onnx
from .report import CannotImport
from .versions import OPSETS

__all__ = ["OPSETS", "CannotImport", "Imported", "import_onnx"]
