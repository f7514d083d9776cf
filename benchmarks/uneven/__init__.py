"""Seven of eight workers: what an uneven share of the batch keeps of the throughput."""
