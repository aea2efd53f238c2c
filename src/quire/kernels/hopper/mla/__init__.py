"""Latent attention (MLA) over pages, on Hopper."""
