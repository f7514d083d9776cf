"""Where workers run: local processes here, Slurm later."""
