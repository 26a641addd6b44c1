"""C kernels of inference, and what writes the C of a network."""
