"""Live reshaping of running hybrid-parallel training jobs on Slurm clusters."""

__version__ = "0.1.0"
