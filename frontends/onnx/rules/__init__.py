"""Rules for ONNX operators, a file per family: the operations of the IR that a node becomes."""
