"""The memory that a handoff takes of a worker, with both worlds held and in bounded memory."""
