"""Slurm: its commands, the allocation a run lives in, steps as agents, nodes that come and go."""
