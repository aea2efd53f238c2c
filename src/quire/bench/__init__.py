"""Random batches, timing of attention, layers and engines beside other implementations, and load for servers."""
