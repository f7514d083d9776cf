"""What a run that nothing happens to costs under liver_hpc, against a plain Megatron loop."""
