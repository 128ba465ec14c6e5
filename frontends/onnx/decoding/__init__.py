"""Decoders of ONNX that keep keys and values: `import_decoder` makes a model for each number of tokens of a turn."""

from .importer import OnnxDecoder, import_decoder, open_decoder
from .interface import DecoderNames

__all__ = ["DecoderNames", "OnnxDecoder", "import_decoder", "open_decoder"]
