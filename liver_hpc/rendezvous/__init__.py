"""Meeting over MPI, and the authenticated control channel that follows it."""
