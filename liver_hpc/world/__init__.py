"""A layout's process groups, model and optimizer, and the training step."""
