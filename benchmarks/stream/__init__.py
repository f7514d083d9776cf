"""TRANSFER against the raw link: bytes per second, memory, and bytes that had to move."""
