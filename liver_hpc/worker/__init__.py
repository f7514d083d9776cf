"""A worker: one process per accelerator, which outlives its worlds."""
