"""Prefill on Hopper: the kernel, and its host side."""
