"""Benchmarks of training and its parts: time and memory, one module for each topic."""
