"""The frontend of Hugging Face folders: `import_folder` takes the folder of a decoder that generates text.

transformers is needed to read a folder, and never to run what was made of it.
"""

from penstock.frontends.decoder_sizes import DecoderSizes

from .folder import open_folder
from .importer import import_folder, longest_context

__all__ = ["DecoderSizes", "import_folder", "longest_context", "open_folder"]
