"""The choice between parameters and constants among the stored tensors of an ONNX file, by their use, name and elements."""
