"""What liver_hpc brings for Slurm sites."""
