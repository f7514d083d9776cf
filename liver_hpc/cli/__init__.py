"""The `liver` command: what an operator types, and what is shown."""
