"""A real Slurm on one machine, every node in namespaces of its own: `python -m slurm.testbed`."""
