"""The torch frontend: `import_torch` takes a module with example arguments, a torch.fx graph, or an ExportedProgram.

With the frontend of Hugging Face it is all of the frontends that imports torch.
"""

from .importer import import_torch

__all__ = ["import_torch"]
