"""Attention for Hopper GPUs, written in Gluon: `mla/` for latent caches, `decode/` for all other layers."""
