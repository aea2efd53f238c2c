"""Decode over pages and ragged rows, and batch-invariant attention, on Hopper."""
