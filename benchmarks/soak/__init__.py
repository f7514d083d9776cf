"""Hundreds of grants, warnings, deaths and stalls of one run, and what becomes of it."""
