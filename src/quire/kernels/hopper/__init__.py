"""Attention for Hopper GPUs, in Gluon: `mla/` for latent caches, `decode/` and `prefill/` for all other layers."""
