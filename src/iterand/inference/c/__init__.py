"""C for inference: kernels and the emitter of a network, and a decoder of tickets."""
