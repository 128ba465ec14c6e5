"""ONNX models as modules: `import_onnx` reads a file by its path."""

from .importer import OPSETS, Imported, import_onnx

__all__ = ["OPSETS", "Imported", "import_onnx"]
