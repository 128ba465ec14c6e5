"""Decoders of ONNX with random weights, and past keys and values as inputs."""
