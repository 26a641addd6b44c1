"""A training step on CUDA: fused layers, captured as one CUDA graph."""
