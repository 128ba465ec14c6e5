"""The choice between parameters and constants among the tensors of an ONNX file, by their use, name and elements."""
