"""What is trained: tensors, model, samples and loss."""
