"""The TVM back end for CPUs and CUDA devices."""
