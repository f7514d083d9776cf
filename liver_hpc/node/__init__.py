"""A node's processes: the agent, its workers, the keeper of a burst allocation."""
