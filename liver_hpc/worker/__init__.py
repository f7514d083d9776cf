"""A worker: one process per accelerator, alive across generations."""
