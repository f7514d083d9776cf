"""What is computed and drawn from the records of a run."""
