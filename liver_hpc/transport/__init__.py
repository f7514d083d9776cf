"""Bytes between workers, within a staging budget."""
