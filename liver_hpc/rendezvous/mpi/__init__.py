"""The meeting over MPI."""
