"""How agents come to run, on this machine and on Slurm, and on which nodes."""
