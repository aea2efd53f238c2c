"""Attention on CPUs, compiled by Numba for the machine that it runs on."""
