"""Attention for Hopper GPUs, written in Gluon: `decode/` for layers with heads of their own, `mla/` for latent ones."""
