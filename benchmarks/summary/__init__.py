"""The results of several benchmarks as one section of the README."""
