"""Typed records of a run, their HDF5 file, and the report made from them."""
