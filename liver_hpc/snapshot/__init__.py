"""The state in memory: each worker's share of it at a step boundary, held twice, from which a world
is filled when a worker is lost."""
