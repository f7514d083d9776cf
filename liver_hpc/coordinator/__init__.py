"""The coordinator's shell: inbox, connections, the registry of workers, what performs decisions."""
