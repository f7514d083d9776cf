"""Handoffs of 1,024 to 65,536 workers, simulated with what small runs were measured to take."""
