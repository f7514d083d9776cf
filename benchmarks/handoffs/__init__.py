"""What stays of many handoffs: memory, descriptors, threads, processes."""
