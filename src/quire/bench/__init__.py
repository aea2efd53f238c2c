"""Random batches, and timing done right."""
