"""Attention in Triton: every layer that `AttentionSpec` admits, on any GPU that Triton compiles for."""
