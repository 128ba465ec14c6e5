"""Rules for ONNX operators on tensors that were dequantised from bytes: what is computed on the bytes."""
