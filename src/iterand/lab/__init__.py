"""What reproduces the paper and goes beyond it: networks, data, training, experiments, reports, theory, benchmarks."""
