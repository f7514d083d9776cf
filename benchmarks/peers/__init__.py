"""Other systems' ways to change a running job, measured like ours: see `__main__`."""
