"""Triton versions of what selection, masking and randomization do on CUDA: same bits, one launch for all layers."""
