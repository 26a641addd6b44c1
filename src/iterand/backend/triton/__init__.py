"""The four operations in Triton, for CUDA."""
