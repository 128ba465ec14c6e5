"""Rules for operators of domain ai.onnx.ml, a file per family: features, linear models, support vectors, trees."""
