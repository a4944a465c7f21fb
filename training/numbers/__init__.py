"""What a step computes: batches, the loss, the update."""
