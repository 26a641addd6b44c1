"""The training step on CUDA: fused layers, one CUDA graph."""
