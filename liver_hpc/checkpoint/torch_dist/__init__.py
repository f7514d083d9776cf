"""Checkpoints in Megatron's torch_dist format, which its own scripts write and load."""
