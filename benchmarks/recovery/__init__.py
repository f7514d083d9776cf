"""What the loss of a worker or a node costs, and what protection from it costs."""
