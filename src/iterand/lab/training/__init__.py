"""Training: one loop for every method, on the public API of the core."""
