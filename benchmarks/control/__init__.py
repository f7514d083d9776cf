"""The control path of a handoff: the real coordinator, and thousands of simulated agents."""
