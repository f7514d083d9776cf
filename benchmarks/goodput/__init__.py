"""The share of time in which training makes progress while workers come and go."""
