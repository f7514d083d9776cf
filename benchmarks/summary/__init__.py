"""The results of several benchmarks as one section of a page."""
