"""ONNX's own backend tests, run against Penstock (README.md)."""
