"""What a run is followed with elsewhere: TensorBoard, Weights & Biases, OpenMetrics; a process of
its own beside the coordinator, which reads the journal."""
