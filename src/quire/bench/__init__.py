"""Random batches, and timing of attention on a CPU or a GPU beside other implementations."""
